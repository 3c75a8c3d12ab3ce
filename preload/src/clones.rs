//! `clone`, `fork` and their kin by libc's `clone()` and `syscall()`, as far as they are forks: the child has memory and
//! files of its own.

use core::ffi::c_void;
use libc::{c_int, c_long, pid_t};
use ringsock_core::ops;
use ringsock_core::sys::is_readable;

use crate::process::{after_fork_in_child, forking};
use crate::real::{self, keep_errno};

/// With any of these the child is no forked one: it shares what the library would change for it, its parent waits for it in the
/// middle of the call, or it has other variables of its own than the thread that it is a copy of.
pub const SHARES: c_int = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::CLONE_SETTLS;

type Start = extern "C" fn(*mut c_void) -> c_int;

/// libc's `clone`, if it shares nothing.
///
/// # Safety
/// The arguments are a program's.
pub unsafe extern "C" fn clone(
    start: Option<Start>,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    // (With the same registers and stack as its own, which takes the later ones from where its flags say.)
    type Real = unsafe extern "C" fn(
        Option<Start>,
        *mut c_void,
        c_int,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
    ) -> c_int;
    let real: Real = core::mem::transmute(real::clone.get());
    let Some(f) = start else {
        return real(start, stack, flags, arg, parent_tid, tls, child_tid);
    };
    let child = Child { f, arg };
    // The child has a copy of our stack, whatever its own is.
    forking(|| real(Some(begin), stack, flags, (&raw const child).cast_mut().cast(), parent_tid, tls, child_tid))
}

struct Child {
    f: Start,
    arg: *mut c_void,
}

extern "C" fn begin(child: *mut c_void) -> c_int {
    // SAFETY: `clone` has passed it, and waits for nobody: this is a copy of it.
    let Child { f, arg } = unsafe { child.cast::<Child>().read() };
    after_fork_in_child();
    let status = f(arg);
    // libc ends its thread by a system call next.
    // SAFETY: no preconditions; `raw_exit` does not return.
    unsafe {
        if keep_errno(|| ops::thread_exiting()) {
            real::raw_exit(status);
        }
    }
    status
}

/// Whether a system call that makes a process makes a forked one.
///
/// # Safety
/// The arguments are a program's.
pub unsafe extern "C" fn is_fork(n: c_long, a: usize, b: usize) -> bool {
    // clone3(2): `flags` and `stack` of its `struct clone_args`.
    const FLAGS: usize = 0;
    const STACK: usize = 5;
    const FIRST_SIZE: usize = 64;
    let (flags, stack) = match n {
        libc::SYS_clone => (a as u64, b as u64),
        libc::SYS_clone3 => {
            let words = a as *const u64;
            if b < FIRST_SIZE || keep_errno(|| !is_readable(words.cast(), FIRST_SIZE)) {
                return false;
            }
            (words.add(FLAGS).read_unaligned(), words.add(STACK).read_unaligned())
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => return true,
        _ => return false,
    };
    // (On a stack of its own it does not return here.)
    flags & SHARES as u64 == 0 && stack == 0
}

/// libc's `syscall`, for such a call.
///
/// # Safety
/// The arguments are a program's.
pub unsafe extern "C" fn syscall(n: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    type Real = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
    let real: Real = core::mem::transmute(real::syscall.get());
    forking(|| real(n, a, b, c, d, e, f) as pid_t).into()
}
