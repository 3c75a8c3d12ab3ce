//! Puppets in another machine.
//!
//! There, `rs-app puppets` forks a puppet for each control connection, and tells its status when it has ended. Check and
//! puppet have a Unix socket each for it, as they would have in one machine: what lies between is passed on by a process
//! beside either, without the library, so that nobody under test has a TCP connection that no check knows of.

use super::cx::{puppet, tell_status, Hosts, Why};
use crate::args::{die, Args};
use crate::{sys, util};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as Name, UnixListener, UnixStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Another machine's puppets, as a check's process sees them.
pub struct Far {
    name: Name,
    /// Where checks and puppets listen.
    pub hosts: Hosts,
    relay: Child,
}

impl Far {
    /// `to`: where `rs-app puppets` listens.
    pub fn new(to: &str) -> Result<Far, Why> {
        let why = |e: io::Error| Why(format!("the puppets at {to}: {e}"));
        let there: SocketAddr = to.parse().map_err(|_| Why(format!("no address and port: {to:?}")))?;
        // Nothing is sent: it only says by which address that host is reached.
        let udp = UdpSocket::bind((if there.is_ipv6() { "::" } else { "0.0.0.0" }, 0)).map_err(why)?;
        udp.connect(there).map_err(why)?;
        let hosts = Hosts { check: udp.local_addr().map_err(why)?.ip(), puppet: there.ip() };
        let text = format!("rs-app.checks.{}", std::process::id());
        let name = Name::from_abstract_name(&text).map_err(why)?;
        let mut relay = relay(&["--from-unix", &text, "--to", to]).map_err(why)?;
        let until = Instant::now() + Duration::from_secs(30);
        while UnixStream::connect_addr(&name).is_err() {
            if Instant::now() > until || relay.try_wait().map_err(why)?.is_some() {
                return Err(Why(format!("nothing passes on what goes to {to}")));
            }
            util::pause_ms(10);
        }
        Ok(Far { name, hosts, relay })
    }

    /// A control socket to a new puppet.
    pub fn call(&self) -> Result<RawFd, Why> {
        let s = UnixStream::connect_addr(&self.name).map_err(|e| Why(format!("no control socket: {e}")))?;
        Ok(s.into_raw_fd())
    }

    /// Ends what passes on.
    pub fn end(mut self) {
        let _ = self.relay.kill();
        let _ = self.relay.wait();
    }
}

/// `puppets --host ADDRESS --port N`: puppets for another machine's `semantics --puppets ADDRESS:N`, until SIGTERM.
pub fn run(a: &Args) -> i32 {
    util::install_term();
    let text = format!("rs-app.puppets.{}", std::process::id());
    let at = format!("{}:{}", a.text("host", "127.0.0.1"), a.num("port", 7000));
    let listener = Name::from_abstract_name(&text).and_then(|n| UnixListener::bind_addr(&n));
    let listener = listener.unwrap_or_else(|e| die(&format!("puppets: {e}")));
    let mut relay = relay(&["--from", &at, "--to-unix", &text]).unwrap_or_else(|e| die(&format!("puppets: {e}")));
    let status = serve(&listener, &mut relay);
    let _ = relay.kill();
    let _ = relay.wait();
    match status {
        Ok(()) => 0,
        Err(Why(w)) => {
            eprintln!("rs-app: puppets: {w}");
            1
        }
    }
}

/// A puppet's process, and what its check's end of the control socket is seen by.
struct Held {
    pid: libc::pid_t,
    ctl: UnixStream,
    /// When the check was seen to be gone.
    gone: Option<Instant>,
}

/// Puppets whose check is gone end by themselves, or are killed after this time.
const GRACE: Duration = Duration::from_secs(5);

fn serve(listener: &UnixListener, relay: &mut Child) -> Result<(), Why> {
    let mut held: Vec<Held> = Vec::new();
    while !util::stopping(0) {
        if relay.try_wait().map_err(|e| Why(e.to_string()))?.is_some() {
            return Err(Why("nothing passes on what comes".into()));
        }
        // Nobody is told when a puppet ends.
        let ms = if held.is_empty() { 100 } else { 5 };
        if sys::wait1(listener.as_raw_fd(), libc::POLLIN, ms)? != 0 {
            let (ctl, _) = listener.accept().map_err(|e| Why(e.to_string()))?;
            let pid = sys::fork()?;
            if pid == 0 {
                sys::end_with_parent();
                for fd in held.iter().map(|h| h.ctl.as_raw_fd()).chain([listener.as_raw_fd()]) {
                    sys::close(fd)?;
                }
                puppet(ctl.into_raw_fd());
                sys::exit(0);
            }
            held.push(Held { pid, ctl, gone: None });
        }
        let mut i = 0;
        while i < held.len() {
            let h = &mut held[i];
            if let Some(status) = sys::waitpid_now(h.pid)? {
                // A check that has been killed does not hear of it.
                let _ = tell_status(h.ctl.as_raw_fd(), status);
                held.swap_remove(i);
                continue;
            }
            if h.gone.is_none() && sys::poll1(h.ctl.as_raw_fd(), libc::POLLRDHUP, 0)? != 0 {
                h.gone = Some(Instant::now());
            }
            if h.gone.is_some_and(|t| t.elapsed() > GRACE) {
                eprintln!("rs-app: a puppet goes on without its check: killed");
                sys::kill(h.pid, libc::SIGKILL)?;
                h.gone = None;
            }
            i += 1;
        }
    }
    for h in held {
        sys::kill(h.pid, libc::SIGKILL)?;
        sys::waitpid(h.pid)?;
    }
    Ok(())
}

/// A process that passes on connections, without the library.
fn relay(args: &[&str]) -> io::Result<Child> {
    let mut to = Command::new(std::env::current_exe()?);
    to.arg("puppets-relay").args(args).args(["--for", &std::process::id().to_string()]);
    to.env_remove("LD_PRELOAD").spawn()
}

/// `puppets-relay --from ADDRESS:PORT|--from-unix NAME --to ADDRESS:PORT|--to-unix NAME --for PID`: passes on what comes
/// by each connection, in both directions, until its parent, PID, ends.
pub fn pass_on(a: &Args) -> i32 {
    sys::end_with_parent();
    // It may have ended before that.
    if u64::from(std::os::unix::process::parent_id()) != a.num("for", 0) {
        return 1;
    }
    match accept(a) {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("rs-app: puppets-relay: {e}");
            1
        }
    }
}

fn accept(a: &Args) -> io::Result<()> {
    let name = |option: &str| Name::from_abstract_name(a.text(option, ""));
    if a.has("from") {
        let (listener, to) = (TcpListener::bind(a.text("from", ""))?, name("to-unix")?);
        util::say(&format!("listening {}", listener.local_addr()?.port()));
        for from in listener.incoming() {
            let from = from?;
            from.set_nodelay(true)?;
            between(from.into(), UnixStream::connect_addr(&to)?.into())?;
        }
    } else {
        let (listener, to) = (UnixListener::bind_addr(&name("from-unix")?)?, a.text("to", ""));
        for from in listener.incoming() {
            let from = from?;
            // Without an answer this check fails, and no other.
            match TcpStream::connect(&to) {
                Ok(to) => {
                    to.set_nodelay(true)?;
                    between(from.into(), to.into())?;
                }
                Err(e) => eprintln!("rs-app: puppets-relay: {to}: {e}"),
            }
        }
    }
    Ok(())
}

/// Passes on bytes, and the ends of streams, in both directions, in threads of its own.
fn between(a: OwnedFd, b: OwnedFd) -> io::Result<()> {
    let pass = |from: RawFd, to: RawFd| {
        let mut room = [0; 4096];
        while let Ok(n @ 1..) = sys::read(from, &mut room) {
            if sys::write_all(to, &room[..n]).is_err() {
                break;
            }
        }
        // Who is gone needs no word.
        let _ = sys::shutdown(to, libc::SHUT_WR);
    };
    let both = move || {
        std::thread::scope(|s| {
            s.spawn(|| pass(a.as_raw_fd(), b.as_raw_fd()));
            pass(b.as_raw_fd(), a.as_raw_fd());
        })
    };
    std::thread::Builder::new().spawn(both).map(|_| ())
}
