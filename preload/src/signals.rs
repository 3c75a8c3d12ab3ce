//! Signals and cancellation.

use libc::{c_int, c_void, pthread_attr_t, pthread_t, sighandler_t};
use ringsock_core::ops;
use ringsock_core::signals;

hook! {
    fn sigaction(sig: c_int, act: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
        signals::sigaction(sig, act, old, |sig, act, old| real(sig, act, old))
    }
}
hook! {
    fn __sigaction(sig: c_int, act: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
        signals::sigaction(sig, act, old, |sig, act, old| real(sig, act, old))
    }
}

// Each of these gives the handler other flags, and libc knows which.
hook! {
    fn signal(sig: c_int, handler: sighandler_t) -> sighandler_t { signals::adopting(sig, || real(sig, handler)) }
}
hook! {
    fn ssignal(sig: c_int, handler: sighandler_t) -> sighandler_t { signals::adopting(sig, || real(sig, handler)) }
}
hook! {
    fn bsd_signal(sig: c_int, handler: sighandler_t) -> sighandler_t { signals::adopting(sig, || real(sig, handler)) }
}
hook! {
    fn sysv_signal(sig: c_int, handler: sighandler_t) -> sighandler_t { signals::adopting(sig, || real(sig, handler)) }
}
hook! {
    fn __sysv_signal(sig: c_int, handler: sighandler_t) -> sighandler_t {
        signals::adopting(sig, || real(sig, handler))
    }
}
hook! {
    fn sigset(sig: c_int, handler: sighandler_t) -> sighandler_t { signals::adopting(sig, || real(sig, handler)) }
}
hook! {
    fn siginterrupt(sig: c_int, yes: c_int) -> c_int { signals::adopting(sig, || real(sig, yes) as usize) as c_int }
}

hook! {
    fn pthread_create(
        thread: *mut pthread_t, attr: *const pthread_attr_t, start: *const c_void, arg: *mut c_void,
    ) -> c_int {
        ops::thread_new(start as usize);
        real(thread, attr, start, arg)
    }
}
hook! {
    fn thrd_create(thread: *mut pthread_t, start: *const c_void, arg: *mut c_void) -> c_int {
        ops::thread_new(start as usize);
        real(thread, start, arg)
    }
}
hook! {
    fn pthread_cancel(thread: pthread_t) -> c_int {
        signals::cancelling();
        real(thread)
    }
}
