//! What libc does with descriptors by itself: stdio, `dprintf`, asynchronous I/O.
//!
//! Its reads and writes do not go through our hooks, so a connection that is given to one of these is on TCP
//! before.

use core::arch::naked_asm;
use core::ffi::CStr;
use libc::{aiocb, c_char, c_int, c_long, c_void, sigevent, DIR, FILE};
use ringsock_core::{dispatch, ops};

use crate::real::{self, keep_errno};

hook! {
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
        let reads = !mode.is_null() && CStr::from_ptr(mode).to_bytes().iter().any(|b| matches!(b, b'r' | b'+'));
        keep_errno(|| if reads { ops::to_reader(fd) } else { ops::to_kernel(fd) });
        let f = real(fd, mode);
        if !f.is_null() {
            ops::stream_made(fd);
        }
        f
    }
}

/// Before libc closes a stream's descriptor.
unsafe fn closing(f: *mut FILE) {
    if !f.is_null() {
        keep_errno(|| ops::closing(libc::fileno(f)));
    }
}

hook! {
    fn fclose(f: *mut FILE) -> c_int {
        closing(f);
        real(f)
    }
}

/// A stream of a new descriptor.
unsafe fn opened(f: *mut FILE) -> *mut FILE {
    if !f.is_null() {
        keep_errno(|| {
            ops::fd_new(libc::fileno(f));
            ops::stream_made(libc::fileno(f));
        });
    }
    f
}

hook! { fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE { opened(real(path, mode)) } }
hook! { fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE { opened(real(path, mode)) } }
hook! {
    fn freopen(path: *const c_char, mode: *const c_char, f: *mut FILE) -> *mut FILE {
        closing(f);
        opened(real(path, mode, f))
    }
}
hook! {
    fn freopen64(path: *const c_char, mode: *const c_char, f: *mut FILE) -> *mut FILE {
        closing(f);
        opened(real(path, mode, f))
    }
}
hook! { fn tmpfile() -> *mut FILE { opened(real()) } }
hook! { fn tmpfile64() -> *mut FILE { opened(real()) } }
hook! {
    /// (`pclose` goes unseen, and a pipe is all that such a stream ever is.)
    fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
        let f = real(command, mode);
        if !f.is_null() {
            keep_errno(|| ops::fd_new(libc::fileno(f)));
        }
        f
    }
}
hook! {
    fn opendir(path: *const c_char) -> *mut DIR {
        let dir = real(path);
        if !dir.is_null() {
            keep_errno(|| ops::fd_new(libc::dirfd(dir)));
        }
        dir
    }
}

// --------------------------------------------------------------------- dprintf

hook! {
    /// (A `va_list` is passed by its address on both architectures.)
    fn vdprintf(fd: c_int, format: *const c_char, args: *mut c_void) -> c_int {
        keep_errno(|| ops::to_kernel(fd));
        real(fd, format, args)
    }
}
hook! {
    fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, args: *mut c_void) -> c_int {
        keep_errno(|| ops::to_kernel(fd));
        real(fd, flag, format, args)
    }
}

unsafe extern "C" fn before(fd: c_int, real: &'static real::Real) -> *const c_void {
    keep_errno(|| {
        ops::to_kernel(fd);
        real.get()
    })
}

/// A function of any number of arguments, which go on to the real one as they are.
macro_rules! variadic {
    ($name:ident) => {
        #[no_mangle]
        #[unsafe(naked)]
        #[cfg(target_arch = "x86_64")]
        unsafe extern "C" fn $name() -> c_int {
            naked_asm!(
                "push rbp",
                "mov rbp, rsp",
                "sub rsp, 192",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov [rsp + 48], rax",
                "movaps [rsp + 64], xmm0",
                "movaps [rsp + 80], xmm1",
                "movaps [rsp + 96], xmm2",
                "movaps [rsp + 112], xmm3",
                "movaps [rsp + 128], xmm4",
                "movaps [rsp + 144], xmm5",
                "movaps [rsp + 160], xmm6",
                "movaps [rsp + 176], xmm7",
                "lea rsi, [rip + {real}]",
                "call {before}",
                "mov r11, rax",
                "mov rdi, [rsp]",
                "mov rsi, [rsp + 8]",
                "mov rdx, [rsp + 16]",
                "mov rcx, [rsp + 24]",
                "mov r8, [rsp + 32]",
                "mov r9, [rsp + 40]",
                "mov rax, [rsp + 48]",
                "movaps xmm0, [rsp + 64]",
                "movaps xmm1, [rsp + 80]",
                "movaps xmm2, [rsp + 96]",
                "movaps xmm3, [rsp + 112]",
                "movaps xmm4, [rsp + 128]",
                "movaps xmm5, [rsp + 144]",
                "movaps xmm6, [rsp + 160]",
                "movaps xmm7, [rsp + 176]",
                "leave",
                "jmp r11",
                real = sym real::$name,
                before = sym before,
            )
        }

        #[no_mangle]
        #[unsafe(naked)]
        #[cfg(target_arch = "aarch64")]
        unsafe extern "C" fn $name() -> c_int {
            naked_asm!(
                "stp x29, x30, [sp, #-208]!",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "stp q0, q1, [sp, #80]",
                "stp q2, q3, [sp, #112]",
                "stp q4, q5, [sp, #144]",
                "stp q6, q7, [sp, #176]",
                "adrp x1, {real}",
                "add x1, x1, :lo12:{real}",
                "bl {before}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]",
                "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]",
                "ldp x6, x7, [sp, #64]",
                "ldp q0, q1, [sp, #80]",
                "ldp q2, q3, [sp, #112]",
                "ldp q4, q5, [sp, #144]",
                "ldp q6, q7, [sp, #176]",
                "ldp x29, x30, [sp], #208",
                "br x16",
                real = sym real::$name,
                before = sym before,
            )
        }
    };
}

variadic!(dprintf);
variadic!(__dprintf_chk);

// ------------------------------------------------------------ asynchronous I/O

unsafe fn queued(cb: *const aiocb, reads: bool) {
    if !cb.is_null() {
        let fd = (*cb).aio_fildes;
        keep_errno(|| if reads { ops::to_reader(fd) } else { ops::to_kernel(fd) });
    }
}

unsafe fn listed(cb: *const aiocb) {
    queued(cb, !cb.is_null() && (*cb).aio_lio_opcode == libc::LIO_READ);
}

hook! { fn aio_read(cb: *mut aiocb) -> c_int { queued(cb, true); real(cb) } }
hook! { fn aio_read64(cb: *mut aiocb) -> c_int { queued(cb, true); real(cb) } }
hook! { fn aio_write(cb: *mut aiocb) -> c_int { queued(cb, false); real(cb) } }
hook! { fn aio_write64(cb: *mut aiocb) -> c_int { queued(cb, false); real(cb) } }
// libaio's. Where the process has none yet, but may load it later, it is the system call, as there.
hook! {
    fn io_submit(context: usize, n: c_long, list: *const *const c_void) -> c_int {
        keep_errno(|| dispatch::submitted(n, list));
        real(context, n, list)
    }
}

hook! {
    fn lio_listio(mode: c_int, list: *const *mut aiocb, n: c_int, event: *mut sigevent) -> c_int {
        (0..n.max(0) as usize).for_each(|i| listed(*list.add(i)));
        real(mode, list, n, event)
    }
}
hook! {
    fn lio_listio64(mode: c_int, list: *const *mut aiocb, n: c_int, event: *mut sigevent) -> c_int {
        (0..n.max(0) as usize).for_each(|i| listed(*list.add(i)));
        real(mode, list, n, event)
    }
}
