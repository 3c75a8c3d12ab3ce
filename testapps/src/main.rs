//! `rs-app`: small programs over plain sockets that stand for real ones.
//!
//! They know nothing of ringsock. Run without a preload they check the kernel's TCP, run with it
//! they check that nothing has changed.

mod echo_client;
mod echo_server;
mod more;
mod pingpong;
mod prng;
mod programs;
mod semantics;
mod soak;
mod start;
mod stream;
mod sys;
mod util;
mod waiter;

use ringsock_testapps::{args, load};

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let Some(code) = load::command(words.get(1..).unwrap_or(&[])) {
        std::process::exit(code);
    }
    let a = args::Args::parse(words.get(2..).unwrap_or(&[]));
    let name = words.get(1).map(String::as_str).filter(|_| !a.has("help")).unwrap_or("");
    let code = match name {
        "pingpong-server" => pingpong::server(&a),
        "pingpong-client" => pingpong::client(&a),
        "stream-server" => stream::server(&a),
        "stream-client" => stream::client(&a),
        "soak-server" => soak::server(&a),
        "soak-client" => soak::client(&a),
        "soak" => soak::soak(&a),
        "soak-self" => soak::both(&a),
        "echo-server" => echo_server::run(&a),
        "echo-client" => echo_client::run(&a),
        "semantics" => semantics::run(&a),
        "puppets" => semantics::far::run(&a),
        "puppets-relay" => semantics::far::pass_on(&a),
        "programs" => programs::run(&a),
        _ => {
            eprintln!(
                "usage: rs-app pingpong-server|pingpong-client|stream-server|stream-client|\
                 soak|soak-server|soak-client|soak-self|echo-server|echo-client|semantics|puppets|programs [OPTIONS]\n\
                        rs-app {} KIND [OPTIONS], with KIND one of {}",
                load::VERBS.join("|"),
                load::KINDS.join(", ")
            );
            2
        }
    };
    std::process::exit(code);
}
