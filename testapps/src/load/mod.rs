//! Workloads of messaging systems over plain sockets: servers and clients that know nothing of
//! ringsock, verify every byte and say what they measured.
//!
//! Each kind is a pair of programs: `load-server KIND` says `listening PORT` and ends by SIGTERM,
//! `load-client KIND --port PORT` runs for a time and ends with one line `OK name=value ...`.

mod channel;
mod common;
mod kafka;
mod memcache;
mod mqtt;
mod nats;
mod netty;
mod pubsub;
mod stomp;
mod trips;
mod window;
mod zookeeper;

use crate::args::Args;

/// The words that a command line begins with.
pub const VERBS: [&str; 2] = ["load-server", "load-client"];

/// What there is.
pub const KINDS: [&str; 11] =
    ["kafka", "channel", "window", "netty", "pubsub", "memcache", "mqtt", "nats", "stomp", "zookeeper", "trips"];

/// Runs `load-server KIND ...` or `load-client KIND ...`; `None` if the words say something else.
pub fn command(words: &[String]) -> Option<i32> {
    let verb = VERBS.iter().position(|v| words.first().is_some_and(|w| w == v))?;
    let kind = words.get(1).map(String::as_str).unwrap_or("");
    let a = Args::parse(words.get(2..).unwrap_or(&[]));
    let r = match (verb, kind) {
        (0, "kafka") => kafka::server(&a),
        (0, "channel") => channel::server(&a),
        (0, "window") => window::server(&a),
        (0, "netty") => netty::server(&a),
        (0, "pubsub") => pubsub::server(&a),
        (0, "trips") => trips::server(&a),
        (1, "kafka") => kafka::client(&a),
        (1, "channel") => channel::client(&a),
        (1, "window") => window::client(&a),
        (1, "netty") => netty::client(&a),
        (1, "pubsub") => pubsub::client(&a),
        (1, "memcache") => memcache::client(&a),
        (1, "mqtt") => mqtt::client(&a),
        (1, "nats") => nats::client(&a),
        (1, "stomp") => stomp::client(&a),
        (1, "zookeeper") => zookeeper::client(&a),
        (1, "trips") => trips::client(&a),
        _ => Err(std::io::Error::other(format!("no such workload; there are {}", KINDS.join(", ")))),
    };
    Some(match r {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("{} {kind}: {e}", VERBS[verb]);
            1
        }
    })
}
