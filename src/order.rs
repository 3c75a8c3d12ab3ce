//! What an operator tells a process that runs: to leave rings, and to use them again.
//!
//! The order comes over the socket at which a process listens for images that have inherited its connections
//! ([`crate::foreign::home_of`]), from the same user or from root. Forked children keep it.

use crate::rendezvous as rv;
use crate::sys::{self, Errno};
use crate::{foreign, poll};
use core::sync::atomic::{AtomicBool, Ordering::*};
use libc::c_int;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// All connections return to TCP, and no more leave it.
    Off,
    /// They may leave it again.
    On,
}

/// First word of an order.
const MAGIC: u64 = u64::from_le_bytes(*b"rs-order");
/// How long a process may take to hear it.
const ANSWER_NS: i64 = 5_000_000_000;

static OFF: AtomicBool = AtomicBool::new(false);

/// Whether this process is to use no rings.
pub fn is_off() -> bool {
    OFF.load(Relaxed)
}

/// Obeys.
pub fn set(o: Order) {
    OFF.store(o == Order::Off, SeqCst);
}

/// The order in a message, if it is one.
pub fn decode(words: &[u64]) -> Option<Order> {
    match words {
        [MAGIC, 0] => Some(Order::Off),
        [MAGIC, 1] => Some(Order::On),
        _ => None,
    }
}

/// Whether the process at the other end of a socket may give orders.
pub fn is_entitled(sock: c_int) -> bool {
    // SAFETY: no preconditions.
    let own = unsafe { sys::sys!(libc::SYS_geteuid) };
    rv::credentials(sock).is_some_and(|(_, uid, _)| uid == 0 || own == Ok(uid as usize))
}

/// Gives an order to process `pid` (the number that it has for itself), which must share our network namespace. Returns how
/// many of its connections it concerns; what it asks for may take a moment. Blocks for at most five seconds.
///
/// # Errors
/// `ECONNREFUSED`: it looks for no peer at present, so there is nobody who could hear it. `EPERM`: somebody else has that
/// name, or it is another user's. `ETIMEDOUT`: it does not answer.
pub fn give(pid: u32, o: Order) -> Result<u64, Errno> {
    let s = rv::call(&foreign::home_of(pid))?;
    let words = [MAGIC, u64::from(o == Order::On)];
    let mut count = 0u64;
    // SAFETY: the buffers are valid for their lengths.
    let answered = unsafe {
        let said = sys::send(s, words.as_ptr().cast(), size_of_val(&words), libc::MSG_NOSIGNAL);
        said.and_then(|_| {
            poll::wait_one(s, libc::POLLIN, ANSWER_NS).map_err(|_| libc::ETIMEDOUT)?;
            sys::recv(s, (&raw mut count).cast(), 8, libc::MSG_DONTWAIT)
        })
    };
    // Anybody may bind a name.
    let known = rv::credentials(s).is_some_and(|(p, ..)| p == pid);
    sys::close_raw(s);
    match answered {
        _ if !known => Err(libc::EPERM),
        Ok(8) => Ok(count),
        Ok(_) => Err(libc::EPERM),
        Err(libc::EAGAIN) => Err(libc::ETIMEDOUT),
        Err(e) => Err(e),
    }
}
