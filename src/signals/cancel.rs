//! Threads that are cancelled.
//!
//! As a rule one is cancelled where it sleeps, in [`super::sleep`], or where a call begins, in [`point`]. But a program may have
//! asked for a thread to be cancelled wherever it is (`PTHREAD_CANCEL_ASYNCHRONOUS`), which libc does in a handler of its own
//! for a signal that nobody else is to use. One of ours stands before that, as before the program's: no thread leaves a critical
//! section so, with a lock that nobody unlocks, or counted among those that sleep.

use super::*;
use crate::sync::{futex_wait, futex_wake, now_ns};

/// The signal, as in glibc.
const SIGCANCEL: c_int = 32;

/// Some thread has been cancelled, so that calls have to look.
static CANCELS: AtomicBool = AtomicBool::new(false);

/// Whether our handler stands before libc's.
static STANDS: AtomicU32 = AtomicU32::new(NOT);
const NOT: u32 = 0;
/// A thread sees to it.
const SOON: u32 = 1;
const THERE: u32 = 2;

/// How long that is waited for.
const SOON_NS: i64 = 1_000_000_000;

/// libc's handler.
static LIBCS: AtomicUsize = AtomicUsize::new(0);

extern "C" {
    fn pthread_cancel(thread: libc::pthread_t) -> c_int;
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// `pthread_cancel(3)` is about to be called.
pub fn cancelling() {
    CANCELS.store(true, SeqCst);
    if STANDS.load(Acquire) != THERE {
        stand_before();
    }
}

/// Puts our handler before libc's, before the first signal is sent.
#[cold]
fn stand_before() {
    let is_helper = || me(|t| t.uncancellable.get());
    if !process::has_threads() || !process::is_active() || process::is_guest() || is_helper() {
        return;
    }
    if STANDS.compare_exchange(NOT, SOON, AcqRel, Acquire).is_ok() {
        // (Where there can be no such thread the next one to be cancelled finds what libc installs now.)
        let stands = adopt();
        if stands || !crate::bg::spawn(have_it_installed, STACK_BYTES) {
            settle(stands);
        }
    }
    let until = now_ns() + SOON_NS;
    while STANDS.load(Acquire) == SOON && now_ns() < until {
        let _ = futex_wait(&STANDS, SOON, until - now_ns());
    }
}

fn settle(stands: bool) {
    STANDS.store(if stands { THERE } else { NOT }, Release);
    futex_wake(&STANDS, i32::MAX);
}

/// Puts our handler before libc's, if that is installed. Whether it stands there.
fn adopt() -> bool {
    let ours = on_cancel as *const () as usize;
    let mut k = Action::NONE;
    if kernel_action(SIGCANCEL, None, Some(&mut k)).is_err() || !is_handler(k.handler) {
        return false;
    }
    if k.handler == ours {
        return true;
    }
    LIBCS.store(k.handler, SeqCst);
    k.handler = ours;
    kernel_action(SIGCANCEL, Some(&k), None).is_ok()
}

/// What a thread needs to find a library in.
const STACK_BYTES: usize = 256 << 10;

/// glibc installs its handler (since 2.34) when a thread is cancelled for the first time: this one, which does not mind.
extern "C" fn have_it_installed(_: *mut c_void) -> *mut c_void {
    // SAFETY: no pointers but null; the thread is this one.
    uncancellable(|| unsafe {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, core::ptr::null_mut());
        pthread_cancel(libc::pthread_self());
    });
    settle(adopt());
    core::ptr::null_mut()
}

/// What the kernel calls instead of libc's handler.
unsafe extern "C" fn on_cancel(sig: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments.
    if me(|t| t.is_critical() && unsafe { put_off(t, sig, info, context.cast(), 0) }) {
        return;
    }
    let mut buffer = Cleanup { routine: gone, arg: core::ptr::null_mut(), canceltype: 0, prev: core::ptr::null_mut() };
    // SAFETY: `buffer` lives until the pop; this is libc's handler, with the kernel's arguments. Nothing here needs to be
    // dropped.
    unsafe {
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = core::mem::transmute(LIBCS.load(SeqCst));
        _pthread_cleanup_push(&mut buffer, gone, core::ptr::null_mut());
        handler(sig, info, context);
        _pthread_cleanup_pop(&mut buffer, 0);
    }
}

/// The thread has left its call.
unsafe extern "C" fn gone(_: *mut c_void) {
    crate::pins::let_go();
}

/// Whether any thread was ever cancelled: a thread that does not come back may have left by a handler's jump otherwise.
pub fn any_cancelled() -> bool {
    CANCELS.load(Relaxed)
}

/// A cancellation point: the thread ends here if it has been cancelled. Nothing may be left to drop.
#[inline(always)]
pub fn point() {
    if CANCELS.load(Relaxed) {
        test_cancel();
    }
}

#[cold]
fn test_cancel() {
    // SAFETY: no frame of ours has anything to drop.
    unsafe { pthread_testcancel() };
}

/// Runs a call that is no cancellation point.
pub fn uncancellable<R>(f: impl FnOnce() -> R) -> R {
    let was = me(|t| t.uncancellable.replace(true));
    let r = f();
    me(|t| t.uncancellable.set(was));
    r
}

/// In a forked child: whoever saw to the handler is not here.
pub(super) fn reset_after_fork() {
    let _ = STANDS.compare_exchange(SOON, NOT, Relaxed, Relaxed);
}
