//! The end of a process whose main thread has ended before it (`pthread_exit`).
//!
//! Such a process ends with its last thread, by libc's `exit(0)`. libc counts threads, ours among them, so it would never
//! come to that. So the background thread looks, once the main thread has said that it ends, whether only threads of the
//! library's are left, and then has another call `exit`: what is to be done at the end of a process is done beside it, as ever.
//! (Where there is no background thread, or it has nothing to do and ends, libc's count is right.)
//!
//! The main thread says so by a destructor of what it has under a key: these are called when a thread ends, and not when the
//! process does.

use super::*;
use crate::process;
use crate::textfile::TextFile;
use core::sync::atomic::{AtomicI64, AtomicU64};

/// How often is looked.
const LOOK_NS: i64 = 20 * MS;
/// No key could be had.
const NONE: u32 = u32::MAX;

/// What the main thread has its mark under.
static KEY: AtomicU32 = AtomicU32::new(NONE);
/// When to look next; `i64::MAX`: the main thread has not ended, or all is done.
static LOOK_AT: AtomicI64 = AtomicI64::new(i64::MAX);
/// The signals that the main thread had blocked at its end.
static MASK: AtomicU64 = AtomicU64::new(0);

/// When the library is loaded.
pub fn init() {
    let mut key = NONE;
    // SAFETY: `key` is writable, the function lives as long as the process.
    if unsafe { libc::pthread_key_create(&mut key, Some(main_ends)) } == 0 {
        KEY.store(key, Relaxed);
        mark();
    }
}

/// In a forked child, whose main thread is the one that has forked.
pub(super) fn reset_after_fork() {
    LOOK_AT.store(i64::MAX, Relaxed);
    mark();
}

/// Has the main thread, which calls this, say when it ends.
fn mark() {
    let key = KEY.load(Relaxed);
    if key != NONE && crate::thread::tid() == process::pid() {
        // SAFETY: our key; what is there is not looked at.
        unsafe { libc::pthread_setspecific(key, (&raw const KEY).cast()) };
    }
}

extern "C" fn main_ends(_: *mut c_void) {
    if !process::is_active() || process::is_guest() || crate::thread::tid() != process::pid() {
        return;
    }
    let mut mask = 0u64;
    // SAFETY: `mask` has the eight bytes of the kernel's.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, 0, &mut mask, 8) };
    MASK.store(mask, Relaxed);
    LOOK_AT.store(0, SeqCst);
    bell::ring(0);
}

/// When to look.
pub(super) fn due() -> i64 {
    LOOK_AT.load(SeqCst)
}

/// Ends the process, if it is time.
pub(super) fn look(now: i64) {
    if now < due() {
        return;
    }
    // Once it is gone the others can only become fewer.
    let over = is_main_gone() && life::is_all_but_main();
    LOOK_AT.store(if over { i64::MAX } else { now + LOOK_NS }, SeqCst);
    if over && !life::spawn(ends, 0) {
        ends(core::ptr::null_mut());
    }
}

/// Whether the main thread has done all that it does at its end.
fn is_main_gone() -> bool {
    // The state of a process is its main thread's, and follows the name, in which anything may stand.
    let text = TextFile::read(b"/proc/self/stat\0", 4096).ok();
    text.is_some_and(|t| {
        let name = t.bytes().iter().rposition(|b| *b == b')');
        name.and_then(|i| t.bytes().get(i + 2)).is_some_and(|state| matches!(state, b'Z' | b'X'))
    })
}

extern "C" fn ends(_: *mut c_void) -> *mut c_void {
    let mask = MASK.load(Relaxed);
    // SAFETY: eight readable bytes; the rest is what libc calls when the last thread ends.
    unsafe {
        let _ = sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &mask, 0, 8);
        libc::exit(0)
    }
}
