//! Raw system calls.
//!
//! Nothing inside the library may call an interposed libc symbol: it would
//! come back to us, and it would use the program's `errno`. Every kernel
//! request of the library therefore goes through the inline assembly here.
//! Errors are returned as positive `errno` values.

use core::arch::asm;
use libc::{c_int, c_long, c_void};

/// A positive `errno` value.
pub type Errno = i32;

/// A result of a system call.
pub type SysResult<T = usize> = Result<T, Errno>;

/// Issues system call `n` with six arguments.
///
/// # Safety
/// The arguments must be what the system call expects; pointers among them
/// must be valid for the access that the kernel makes.
#[inline(always)]
pub unsafe fn syscall6(n: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> SysResult {
    let ret: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the x86-64 Linux system call convention; the caller vouches for the arguments.
    unsafe {
        asm!("syscall", inlateout("rax") n as isize => ret, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the aarch64 Linux system call convention; the caller vouches for the arguments.
    unsafe {
        asm!("svc 0", in("x8") n, inlateout("x0") a as isize => ret, in("x1") b, in("x2") c,
            in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    if (-4095..0).contains(&ret) {
        Err(-ret as i32)
    } else {
        Ok(ret as usize)
    }
}

macro_rules! sys {
    ($n:expr) => { $crate::sys::syscall6($n, 0, 0, 0, 0, 0, 0) };
    ($n:expr, $a:expr) => { $crate::sys::syscall6($n, $a as usize, 0, 0, 0, 0, 0) };
    ($n:expr, $a:expr, $b:expr) => { $crate::sys::syscall6($n, $a as usize, $b as usize, 0, 0, 0, 0) };
    ($n:expr, $a:expr, $b:expr, $c:expr) => { $crate::sys::syscall6($n, $a as usize, $b as usize, $c as usize, 0, 0, 0) };
    ($n:expr, $a:expr, $b:expr, $c:expr, $d:expr) => { $crate::sys::syscall6($n, $a as usize, $b as usize, $c as usize, $d as usize, 0, 0) };
    ($n:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr) => { $crate::sys::syscall6($n, $a as usize, $b as usize, $c as usize, $d as usize, $e as usize, 0) };
    ($n:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr) => { $crate::sys::syscall6($n, $a as usize, $b as usize, $c as usize, $d as usize, $e as usize, $f as usize) };
}
pub(crate) use sys;
