//! The real functions, and what hooks are made of.

use crate::lookup;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use libc::{c_int, c_long, c_uint, c_void, epoll_event, sigset_t, timespec};
use ringsock_core::copy;
use ringsock_core::ops::Outcome;
use ringsock_core::sys::syscall6;

/// A function of the library behind ours, found when first needed.
#[repr(C)]
pub struct Real {
    /// First, because the hook of `syscall` reads it in assembly.
    at: AtomicPtr<c_void>,
    name: &'static CStr,
    /// What to call if this libc does not have the function.
    missing: *const c_void,
}

// SAFETY: `missing` is the address of a function; the rest is immutable or atomic.
unsafe impl Sync for Real {}

impl Real {
    const fn new(name: &'static CStr, missing: *const c_void) -> Self {
        Real { at: AtomicPtr::new(core::ptr::null_mut()), name, missing }
    }

    /// Its name.
    pub fn name(&self) -> &'static CStr {
        self.name
    }

    /// The function's address, never null.
    #[inline(always)]
    pub fn get(&self) -> *const c_void {
        let at = self.at.load(Ordering::Relaxed);
        if at.is_null() {
            self.resolve()
        } else {
            at
        }
    }

    #[cold]
    #[inline(never)]
    fn resolve(&self) -> *const c_void {
        keep_errno(|| {
            let found = lookup::next(self.name);
            let found = if found.is_null() { self.missing.cast_mut() } else { found };
            self.at.store(found, Ordering::Relaxed);
            found
        })
    }
}

/// Runs `f` and puts `errno` back: a call that succeeds leaves no trace there.
#[inline(always)]
pub fn keep_errno<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: errno's address is valid in the thread that asks for it.
    unsafe {
        let errno = libc::__errno_location();
        let before = errno.read();
        let result = f();
        errno.write(before);
        result
    }
}

/// The types that hooks return.
pub trait Return {
    /// The value as the C function returns it.
    fn of(value: isize) -> Self;
}

impl Return for i32 {
    #[inline(always)]
    fn of(value: isize) -> Self {
        value as i32
    }
}

impl Return for isize {
    #[inline(always)]
    fn of(value: isize) -> Self {
        value
    }
}

impl Return for i64 {
    #[inline(always)]
    fn of(value: isize) -> Self {
        value as i64
    }
}

/// Ends a call that the core has served, in the way of C.
#[inline(always)]
pub fn finish<R: Return>(outcome: Outcome) -> R {
    match outcome {
        Outcome::Done(value) => R::of(value),
        Outcome::Fail(errno) => fail(errno),
        // Hooks deal with it before; it is here so that nothing can panic.
        Outcome::Bypass => fail(libc::ENOSYS),
    }
}

#[cold]
fn fail<R: Return>(errno: c_int) -> R {
    // SAFETY: errno's address is valid in the thread that asks for it.
    unsafe { *libc::__errno_location() = errno };
    R::of(-1)
}

/// Whether the real functions are libc's own, and not those of another library that interposes them behind us.
static LIBCS: AtomicBool = AtomicBool::new(false);

/// Whether a system call may be made without libc: the program has one thread. libc takes it to have more as soon as it has
/// our background thread, and would prepare each call for being cancelled, at the cost of some 20 ns.
#[inline(always)]
pub fn is_straight() -> bool {
    LIBCS.load(Ordering::Relaxed) && !ringsock_core::process::has_threads()
}

/// A system call without libc, as its function would return.
///
/// # Safety
/// As for the call.
#[inline(always)]
pub unsafe fn straight<R: Return, const N: usize>(n: c_long, args: [usize; N]) -> R {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&args);
    raw(n, all)
}

/// Where a library lies in which the function `of` is: `from..to`, nowhere as long as it was not found.
pub struct Library {
    of: usize,
    from: usize,
    to: usize,
}

impl Library {
    /// Those that have the functions at these places.
    pub fn with<const N: usize>(functions: [usize; N]) -> [Library; N] {
        let mut all = functions.map(|of| Library { of, from: 0, to: 0 });
        let mut list: &mut [Library] = &mut all;
        // SAFETY: what is passed on is what `find` takes it for, and outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(find), (&raw mut list).cast()) };
        all
    }

    /// Those that have libc's functions: older ones have some in libpthread.
    pub fn libcs() -> [usize; 2] {
        [libc::gnu_get_libc_version as *const () as usize, libc::pthread_self as *const () as usize]
    }

    /// Whether a function is there.
    pub fn has(&self, function: *const c_void) -> bool {
        (self.from..self.to).contains(&(function as usize))
    }
}

/// Finds libraries (a `&mut [Library]`) among those that are loaded. (`dladdr` would look through all symbols of libc for each
/// function, which takes as long as to start a small program.)
unsafe extern "C" fn find(info: *mut libc::dl_phdr_info, _: usize, libraries: *mut c_void) -> c_int {
    let (info, libraries) = (&*info, &mut *libraries.cast::<&mut [Library]>());
    let headers = core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
    let parts = headers.iter().filter(|h| h.p_type == libc::PT_LOAD).map(|h| {
        let from = (info.dlpi_addr as usize).wrapping_add(h.p_vaddr as usize);
        from..from.wrapping_add(h.p_memsz as usize)
    });
    for library in libraries.iter_mut() {
        if parts.clone().any(|part| part.contains(&library.of)) {
            library.from = parts.clone().map(|part| part.start).min().unwrap_or(0);
            library.to = parts.clone().map(|part| part.end).max().unwrap_or(0);
        }
    }
    0
}

/// Finds out whether all of those that are called without libc are libc's, or libpthread's, where older ones have them.
fn know_libc() {
    let ([libc, pthread], [copies, ours]) = (Library::libcs(), copy::by());
    let [libraries @ .., copies, ours] = Library::with([libc, pthread, copies, ours]);
    copy::lie_in([copies.from..copies.to, ours.from..ours.to]);
    let all = [
        &read,
        &__read,
        &__read_chk,
        &recv,
        &__recv_chk,
        &recvfrom,
        &__recvfrom_chk,
        &readv,
        &recvmsg,
        &write,
        &__write,
        &writev,
        &send,
        &__send,
        &sendto,
        &sendmsg,
        &close,
        &__close,
        &poll,
        &__poll,
        &__poll_chk,
    ];
    let theirs = all.iter().all(|real| libraries.iter().any(|l| l.has(real.get())));
    LIBCS.store(theirs, Ordering::Relaxed);
}

/// Defines an interposed function of C.
///
/// `fn name(args) -> type = outcome;` calls the real function if the outcome
/// is `Bypass`; with `point` in front, it is a cancellation point, and with `point(N)` the real function only makes system
/// call N with the same arguments, see [`is_straight`]. `fn name(args)
/// -> type { body }` does as it likes, and has the real function under the name
/// `real`.
macro_rules! hook {
    (point($number:expr) fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty = $ask:expr) => {
        hook! {
            fn $name($($arg: $ty),*) -> $ret {
                ringsock_core::signals::point();
                match $ask {
                    ringsock_core::ops::Outcome::Bypass if $crate::real::is_straight() => {
                        $crate::real::straight($number, [$($arg as usize),*])
                    }
                    ringsock_core::ops::Outcome::Bypass => real($($arg),*),
                    served => $crate::real::finish(served),
                }
            }
        }
    };
    (point $(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty = $ask:expr) => {
        hook! {
            $(#[$meta])*
            fn $name($($arg: $ty),*) -> $ret = {
                ringsock_core::signals::point();
                $ask
            }
        }
    };
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty = $ask:expr) => {
        hook! {
            $(#[$meta])*
            fn $name($($arg: $ty),*) -> $ret {
                match $ask {
                    ringsock_core::ops::Outcome::Bypass => real($($arg),*),
                    served => $crate::real::finish(served),
                }
            }
        }
    };
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty $body:block) => {
        $(#[$meta])*
        #[no_mangle]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            #[inline(always)]
            #[allow(dead_code, clippy::too_many_arguments)]
            unsafe fn real($($arg: $ty),*) -> $ret {
                let at = $crate::real::$name.get();
                let at: unsafe extern "C" fn($($ty),*) -> $ret = core::mem::transmute(at);
                at($($arg),*)
            }
            $body
        }
    };
}

/// Defines an interposed function of the dynamic linker, of up to three arguments: a jump to the function that the chooser
/// gives, which gets the same arguments. What they do depends on who calls them (its run path, the libraries behind it).
macro_rules! jump {
    (fn $name:ident to $chooser:ident) => {
        #[no_mangle]
        #[unsafe(naked)]
        #[cfg(target_arch = "x86_64")]
        unsafe extern "C" fn $name() -> *mut libc::c_void {
            core::arch::naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "call {chooser}",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp rax",
                chooser = sym $chooser,
            )
        }

        #[no_mangle]
        #[unsafe(naked)]
        #[cfg(target_arch = "aarch64")]
        unsafe extern "C" fn $name() -> *mut libc::c_void {
            core::arch::naked_asm!(
                "stp x0, x1, [sp, #-32]!",
                "stp x2, x30, [sp, #16]",
                "bl {chooser}",
                "mov x16, x0",
                "ldp x2, x30, [sp, #16]",
                "ldp x0, x1, [sp], #32",
                "br x16",
                chooser = sym $chooser,
            )
        }
    };
}

/// Defines the table: a static of type [`Real`] for each name.
macro_rules! table {
    ($($name:ident $(or $missing:path)?),* $(,)?) => {
        $(
            #[allow(non_upper_case_globals)]
            pub static $name: Real = Real::new(
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => unreachable!(),
                },
                table!(@missing $($missing)?),
            );
        )*

        /// All of them.
        pub static ALL: &[&Real] = &[$(&$name),*];

        /// How many there are.
        pub const COUNT: usize = [$(stringify!($name)),*].len();

        /// Finds all functions at once, so that later no hook calls the dynamic linker.
        pub fn resolve_all() {
            for real in ALL {
                real.get();
            }
            know_libc();
        }
    };
    (@missing) => { no_such_function as *const c_void };
    (@missing $missing:path) => { $missing as *const c_void };
}

table! {
    // io.rs
    read, __read, __read_chk, recv, __recv_chk, recvfrom, __recvfrom_chk, readv, recvmsg, recvmmsg,
    preadv2, preadv64v2,
    write, __write, writev, send, __send, sendto, sendmsg, sendmmsg, pwritev2, pwritev64v2,
    sendfile, sendfile64, splice,
    // fds.rs
    socket, socketpair, accept, accept4, connect, __connect, shutdown, getpeername, getsockopt, setsockopt,
    close, __close, close_range or raw_close_range, closefrom or raw_closefrom,
    dup, dup2, __dup2, dup3, fcntl, __fcntl, fcntl64 or real_fcntl, ioctl,
    open, __open, open64, __open64, openat, openat64, creat, creat64,
    __open_2, __open64_2, __openat_2, __openat64_2,
    pipe, pipe2, eventfd, eventfd_write, timerfd_create, signalfd, inotify_init, inotify_init1, memfd_create,
    pidfd_open or raw_pidfd_open, pidfd_getfd or raw_pidfd_getfd, fanotify_init,
    mkstemp, mkstemp64, mkostemp, mkostemp64, mkstemps, mkstemps64, mkostemps, mkostemps64,
    // wait.rs
    poll, __poll, __poll_chk, ppoll, __ppoll_chk, select, __select, pselect,
    epoll_create, epoll_create1, epoll_ctl, epoll_wait, epoll_pwait, epoll_pwait2 or raw_epoll_pwait2,
    // signals.rs
    sigaction, __sigaction, signal, ssignal, bsd_signal, sysv_signal, __sysv_signal, sigset, siginterrupt,
    pthread_create, thrd_create, pthread_cancel,
    // stdio.rs
    fdopen, fclose, fopen, fopen64, freopen, freopen64, tmpfile, tmpfile64, popen, opendir,
    dprintf, __dprintf_chk, vdprintf, __vdprintf_chk,
    aio_read, aio_read64, aio_write, aio_write64, lio_listio, lio_listio64, io_submit or raw_io_submit,
    // plugins.rs
    dlopen or no_library,
    // process.rs
    posix_spawn, posix_spawnp, posix_spawn_file_actions_init, posix_spawn_file_actions_adddup2,
    syscall, prctl, unshare, setns,
    setrlimit, setrlimit64, getrlimit, getrlimit64, prlimit, prlimit64,
    daemon, dlmopen, fork, _Fork or libc::fork, vfork, clone, execve, execv, execvp, execvpe, fexecve, execveat or raw_execveat,
    _exit or raw_exit, _Exit or raw_exit, quick_exit or raw_exit,
}

// What stands in for functions that older libcs do not have. They are called
// with the arguments of the real one; C lets a function ignore some.

extern "C" fn no_such_function() -> c_long {
    fail(libc::ENOSYS)
}

extern "C" fn no_library() -> *mut c_void {
    core::ptr::null_mut()
}

/// A raw system call, as a libc function would return it.
unsafe fn raw<R: Return>(n: c_long, args: [usize; 6]) -> R {
    match syscall6(n, args[0], args[1], args[2], args[3], args[4], args[5]) {
        Ok(value) => R::of(value as isize),
        Err(errno) => fail(errno),
    }
}

unsafe extern "C" fn raw_close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    raw(libc::SYS_close_range, [first as usize, last as usize, flags as usize, 0, 0, 0])
}

unsafe extern "C" fn raw_closefrom(low: c_int) {
    let _: c_int = raw_close_range(low.max(0) as c_uint, c_uint::MAX, 0);
}

unsafe extern "C" fn raw_pidfd_open(pid: libc::pid_t, flags: c_uint) -> c_int {
    raw(libc::SYS_pidfd_open, [pid as usize, flags as usize, 0, 0, 0, 0])
}

unsafe extern "C" fn raw_pidfd_getfd(pidfd: c_int, fd: c_int, flags: c_uint) -> c_int {
    raw(libc::SYS_pidfd_getfd, [pidfd as usize, fd as usize, flags as usize, 0, 0, 0])
}

unsafe extern "C" fn raw_execveat(
    dir: c_int,
    path: *const libc::c_char,
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
    flags: c_int,
) -> c_int {
    raw(libc::SYS_execveat, [dir as usize, path as usize, argv as usize, envp as usize, flags as usize, 0])
}

unsafe extern "C" fn raw_epoll_pwait2(
    ep: c_int,
    events: *mut epoll_event,
    max: c_int,
    limit: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    raw(libc::SYS_epoll_pwait2, [ep as usize, events as usize, max as usize, limit as usize, mask as usize, 8])
}

/// libaio's functions give the error themselves.
unsafe extern "C" fn raw_io_submit(context: usize, n: c_long, list: usize) -> c_int {
    match syscall6(libc::SYS_io_submit, context, n as usize, list, 0, 0, 0) {
        Ok(done) => done as c_int,
        Err(errno) => -errno,
    }
}

/// `exit_group(2)`.
///
/// # Safety
/// None; it is called as libc's own.
pub unsafe extern "C" fn raw_exit(status: c_int) -> c_int {
    raw(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0])
}

/// `fcntl64` came with glibc 2.28; the two are the same function where a long has 64 bits.
unsafe extern "C" fn real_fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int {
    let at: unsafe extern "C" fn(c_int, c_int, usize) -> c_int = core::mem::transmute(fcntl.get());
    at(fd, cmd, arg)
}
