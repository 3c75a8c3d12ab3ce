//! What the conductor and the actors say to each other, over Unix sockets.

use crate::sys::{self, R};
use std::os::fd::RawFd;

/// Numbers that a command carries; what they mean is said at each [`Op`].
pub const ARGS: usize = 20;

/// What an actor can be told to do. In parentheses: what its numbers are.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(u64)]
pub enum Op {
    /// Starts helper thread (0); the answer is its thread id.
    Lane,
    /// Listens; the answer is the fd, and beside it the port.
    Listen,
    /// Connects to port (0).
    Connect,
    /// Accepts from listener (0).
    Accept,
    /// Exchanges messages on (0) until the connection has left TCP, as the end that begins (1), at most (2) times.
    Warm,
    /// Sends on (0) by call (1) (2) bytes with flags (3) of stream (4) from offset (5) on, in (6) pieces.
    Send,
    /// Receives on (0) by call (1) at most (2) bytes with flags (3) of stream (4) from offset (5) on, in (6) pieces.
    Recv,
    /// Shuts (0) down, (1) as for `shutdown`.
    Shutdown,
    /// Closes (0) in the way (1).
    Close,
    /// Duplicates (0) in the way (1) to number (2).
    Dup,
    /// Waits by call (0) at most (1) ms for (2) fds: from (3) on, each fd and its events.
    Poll,
    /// Makes an epoll set.
    EpNew,
    /// `epoll_ctl`: set, operation, fd, events, data.
    EpCtl,
    /// Waits for set (0) by call (1), at most (2) events, at most (3) ms.
    EpWait,
    /// Sets option (1, 2) of (0) to (3), a number, or a pair with (4) if (5) is 1, or milliseconds if it is 2.
    SetOpt,
    /// Asks for option (1, 2) of (0).
    GetOpt,
    /// Sets `O_NONBLOCK` of (0) in the way (1) to (2).
    Nonblock,
    /// `FIONREAD` of (0).
    Fionread,
    /// What `getsockname`, `getpeername`, `lseek`, `fstat` say of (0).
    Names,
    /// Makes something of kind (0) that has an fd or two.
    Other,
    /// Writes (1) bytes to a pipe or the like, (0).
    OtherWrite,
    /// Reads at most (1) bytes from a pipe or the like, (0).
    OtherRead,
    /// Waits until (0) has (1) bytes to read, an end of the stream or not (2), a hang-up or not (3).
    Settle,
    /// Waits until the end of the stream that was sent on (0) is acknowledged.
    Acked,
    /// Forks; the child is process (0).
    Fork,
    /// Waits for the end of process id (0).
    Reap,
    /// Ends the process.
    Quit,
    /// Sends thread (0) the signal (1), whose handler is installed with flags (2).
    Signal,
    /// Passes fd (1) through (0).
    PassFd,
    /// Takes an fd from (0).
    TakeFd,
    /// Sends (1) bytes on (0) by `sendfile`, as `Send` from (4) on.
    Sendfile,
    /// Reads at most (1) bytes of (0) by `splice`, as `Recv` from (4) on.
    Splice,
    /// Sends on (0) without waiting until it is full; the answer is how much, as `Send` from (4) on.
    Fill,
    /// Receives exactly (2) bytes on (0), as `Recv` from (4) on.
    Drain,
    /// Sends all of (2) bytes on (0), as `Send` from (4) on.
    SendAll,
    /// Starts a program that is process (0), in the way (1), with the library unless (2).
    Start,
    /// Becomes that; the answer is that of the next command.
    Become,
    /// Makes (0) one that is inherited over `exec`.
    Keep,
    /// Which numbers below (0) are open.
    Have,
}

/// A command.
#[derive(Clone)]
pub struct Cmd {
    /// What to do.
    pub op: Op,
    /// Whether to answer once before the call is made, too.
    pub announce: bool,
    /// Its numbers.
    pub a: [i64; ARGS],
}

impl Cmd {
    /// A command with its first numbers.
    pub fn new(op: Op, nums: &[i64]) -> Cmd {
        let mut a = [0; ARGS];
        a[..nums.len()].copy_from_slice(nums);
        Cmd { op, announce: false, a }
    }
}

/// An answer.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// What the call returned; -1 with an error.
    pub ret: i64,
    /// The error, or 0.
    pub errno: i32,
    /// A second number, which is not compared.
    pub aux: i64,
    /// Everything that is compared, as text.
    pub text: String,
}

const WORD: usize = 8;

/// Sends a command.
pub fn put_cmd(fd: RawFd, c: &Cmd) -> R<()> {
    let mut b = [0u8; (ARGS + 2) * WORD];
    b[..8].copy_from_slice(&(c.op as u64).to_ne_bytes());
    b[8..16].copy_from_slice(&(c.announce as u64).to_ne_bytes());
    for (d, v) in b[16..].chunks_mut(WORD).zip(c.a) {
        d.copy_from_slice(&v.to_ne_bytes());
    }
    sys::write_all(fd, &b)
}

/// Receives a command.
pub fn get_cmd(fd: RawFd) -> R<Cmd> {
    let mut b = [0u8; (ARGS + 2) * WORD];
    sys::read_exact(fd, &mut b)?;
    let word = |i: usize| u64::from_ne_bytes(b[i * WORD..(i + 1) * WORD].try_into().expect("8 bytes"));
    assert!(word(0) <= Op::Have as u64);
    // SAFETY: the number was written by `put_cmd` of the same program, and is one of the enum's.
    let op = unsafe { std::mem::transmute::<u64, Op>(word(0)) };
    let mut a = [0; ARGS];
    a.iter_mut().enumerate().for_each(|(i, v)| *v = word(i + 2) as i64);
    Ok(Cmd { op, announce: word(1) != 0, a })
}

/// Sends an answer.
pub fn put_reply(fd: RawFd, r: &Reply) -> R<()> {
    let mut b = Vec::with_capacity(32 + r.text.len());
    for v in [r.ret, r.errno as i64, r.aux, r.text.len() as i64] {
        b.extend_from_slice(&v.to_ne_bytes());
    }
    b.extend_from_slice(r.text.as_bytes());
    sys::write_all(fd, &b)
}

/// Receives an answer.
pub fn get_reply(fd: RawFd) -> R<Reply> {
    let mut b = [0u8; 32];
    sys::read_exact(fd, &mut b)?;
    let word = |i: usize| i64::from_ne_bytes(b[i * WORD..(i + 1) * WORD].try_into().expect("8 bytes"));
    let mut text = vec![0; word(3) as usize];
    sys::read_exact(fd, &mut text)?;
    Ok(Reply { ret: word(0), errno: word(1) as i32, aux: word(2), text: String::from_utf8_lossy(&text).into_owned() })
}
