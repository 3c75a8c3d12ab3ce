//! A plugin for tests: it uses a socket of the program that loads it, by libc's functions.

use core::ffi::{c_int, c_void};

/// `send(2)`.
///
/// # Safety
/// As for that.
#[no_mangle]
pub unsafe extern "C" fn plugin_send(fd: c_int, buf: *const c_void, len: usize, flags: c_int) -> isize {
    libc::send(fd, buf, len, flags)
}

/// `recv(2)`.
///
/// # Safety
/// As for that.
#[no_mangle]
pub unsafe extern "C" fn plugin_recv(fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> isize {
    libc::recv(fd, buf, len, flags)
}

/// `poll(2)` of one fd.
#[no_mangle]
pub extern "C" fn plugin_poll(fd: c_int, events: i16, millis: c_int) -> c_int {
    let mut one = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one pollfd, valid for the call.
    match unsafe { libc::poll(&mut one, 1, millis) } {
        1 => one.revents.into(),
        n => n,
    }
}
