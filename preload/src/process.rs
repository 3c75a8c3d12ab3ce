//! Processes, and `syscall()`.

use core::arch::naked_asm;
use core::ptr::{null, null_mut};
use libc::{c_char, c_int, c_long, c_uint, c_ulong, pid_t, rlimit};
use ringsock_core::dispatch;
use ringsock_core::limits;
use ringsock_core::ops::{self, Outcome};
use ringsock_core::process::GUESTS;
use ringsock_core::retire;

use crate::clones::{self, SHARES};
use crate::real::{self, finish, keep_errno};

// ----------------------------------------------------------------------- fork

pub extern "C" fn before_fork() {
    // SAFETY: called by libc in a thread that is about to fork.
    keep_errno(|| unsafe { ops::fork_prepare() });
}

extern "C" fn after_fork_in_parent() {
    // SAFETY: called by libc after `before_fork`, in the same thread.
    keep_errno(|| unsafe { ops::fork_is_over() });
}

pub extern "C" fn after_fork_in_child() {
    // SAFETY: called by libc after `before_fork`, in the copy of the same thread.
    keep_errno(|| unsafe { ops::fork_child() });
}

/// Has libc call us around every `fork`.
pub fn watch_forks() {
    // SAFETY: the functions live as long as the process.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child));
    }
}

hook! {
    /// The handlers are called inside; what they are not told is the result.
    fn fork() -> pid_t {
        let pid = real();
        if pid != 0 {
            keep_errno(|| ops::forked(pid));
        }
        pid
    }
}

/// Around what forks without that libc calls us.
pub unsafe fn forking(fork: impl FnOnce() -> pid_t) -> pid_t {
    before_fork();
    let pid = fork();
    if pid == 0 {
        after_fork_in_child();
    } else {
        after_fork_in_parent();
        keep_errno(|| ops::forked(pid));
    }
    pid
}

hook! {
    /// The `fork` that calls no handlers.
    fn _Fork() -> pid_t { forking(|| real()) }
}

hook! {
    /// libc's own forks by itself, and the parent ends unseen: what it owes to its peers would be lost.
    fn daemon(stay: c_int, keep: c_int) -> c_int {
        match fork() {
            -1 => return -1,
            0 => {}
            _ => _exit(0),
        }
        if libc::setsid() == -1 {
            return -1;
        }
        if stay == 0 {
            libc::chdir(c"/".as_ptr());
        }
        if keep != 0 {
            return 0;
        }
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        let mut st: libc::stat = core::mem::zeroed();
        if null < 0 || libc::fstat(null, &mut st) != 0 {
            return -1;
        }
        // As libc: not whatever else may lie there.
        let device = st.st_mode & libc::S_IFMT == libc::S_IFCHR && st.st_rdev == libc::makedev(1, 3);
        if device {
            (0..3).for_each(|fd| {
                libc::dup2(null, fd);
            });
        }
        if null > 2 || !device {
            libc::close(null);
        }
        if !device {
            *libc::__errno_location() = libc::ENODEV;
            return -1;
        }
        0
    }
}

// ----------------------------------------------------------------------- exec

/// Makes ready for a new image, and goes back if there is none.
#[inline(always)]
unsafe fn exec(path: *const c_char, envp: Strings, real: impl FnOnce() -> c_int) -> c_int {
    keep_errno(|| ops::exec_prepare(path, envp));
    let result = real();
    keep_errno(|| ops::exec_failed());
    result
}

/// `argv` or `envp`.
type Strings = *const *const c_char;

extern "C" {
    static environ: Strings;
}

/// As [`exec`], for a program that is searched for.
#[inline(always)]
unsafe fn exec_found(file: *const c_char, envp: Strings, real: impl FnOnce() -> c_int) -> c_int {
    let mut place = [0; libc::PATH_MAX as usize];
    let path = keep_errno(|| ops::found(file, &mut place));
    exec(path, envp, real)
}

/// As [`exec`], for a child that somebody else makes.
#[inline(always)]
unsafe fn spawn(
    pid: *mut pid_t,
    path: *const c_char,
    envp: Strings,
    acts: Opaque,
    real: impl FnOnce(*mut pid_t) -> c_int,
) -> c_int {
    let mut child = 0;
    let held = keep_errno(|| ops::spawn_prepare(path, envp, acts));
    let result = real(&mut child);
    if held {
        keep_errno(|| ops::spawned(if result == 0 { child } else { 0 }));
    }
    if result == 0 && !pid.is_null() {
        pid.write(child);
    }
    result
}

/// File actions and attributes of `posix_spawn`.
type Opaque = *const core::ffi::c_void;

hook! {
    fn posix_spawn(
        pid: *mut pid_t, path: *const c_char, acts: Opaque, attr: Opaque, argv: Strings, envp: Strings,
    ) -> c_int {
        spawn(pid, path, envp, acts, |pid| real(pid, path, acts, attr, argv, envp))
    }
}
hook! {
    fn posix_spawnp(
        pid: *mut pid_t, file: *const c_char, acts: Opaque, attr: Opaque, argv: Strings, envp: Strings,
    ) -> c_int {
        let mut place = [0; libc::PATH_MAX as usize];
        let path = keep_errno(|| ops::found(file, &mut place));
        spawn(pid, path, envp, acts, |pid| real(pid, file, acts, attr, argv, envp))
    }
}
hook! {
    fn posix_spawn_file_actions_init(acts: *mut core::ffi::c_void) -> c_int {
        ops::spawn_begins(acts);
        real(acts)
    }
}
hook! {
    fn posix_spawn_file_actions_adddup2(acts: *mut core::ffi::c_void, fd: c_int, new: c_int) -> c_int {
        ops::spawn_gives(acts, fd);
        real(acts, fd, new)
    }
}

hook! { fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int { exec(path, envp, || real(path, argv, envp)) } }
hook! { fn execv(path: *const c_char, argv: Strings) -> c_int { exec(path, environ, || real(path, argv)) } }
hook! { fn execvp(file: *const c_char, argv: Strings) -> c_int { exec_found(file, environ, || real(file, argv)) } }
hook! { fn execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int { exec_found(file, envp, || real(file, argv, envp)) } }
hook! { fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int { exec(core::ptr::null(), envp, || real(fd, argv, envp)) } }
hook! {
    fn execveat(dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int {
        exec(path, envp, || real(dir, path, argv, envp, flags))
    }
}

// `execl` and its kin take the strings one by one, as many as there are. They
// may run in a child of `vfork`, so there is no memory to copy them to. But the
// strings that did not fit into registers already lie on the stack in a row:
// the registers are stored in front of them, and there is the array.

unsafe extern "C" fn execl_array(path: *const c_char, argv: Strings) -> c_int {
    execv(path, argv)
}

unsafe extern "C" fn execlp_array(file: *const c_char, argv: Strings) -> c_int {
    execvp(file, argv)
}

unsafe extern "C" fn execle_array(path: *const c_char, argv: Strings) -> c_int {
    let mut end = argv;
    while !end.read().is_null() {
        end = end.add(1);
    }
    // What follows the null is the environment.
    execve(path, argv, end.add(1).read().cast())
}

macro_rules! variadic_exec {
    ($name:ident = $array:ident) => {
        #[no_mangle]
        #[unsafe(naked)]
        #[cfg(target_arch = "x86_64")]
        unsafe extern "C" fn $name() -> c_int {
            naked_asm!(
                // The return address lies between the registers' strings and the others.
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                // Entered with 8 modulo 16, and now 40 lower: aligned for the call.
                "call {array}",
                "pop rdx",
                "add rsp, 40",
                "push rdx",
                "ret",
                array = sym $array,
            )
        }

        #[no_mangle]
        #[unsafe(naked)]
        #[cfg(target_arch = "aarch64")]
        unsafe extern "C" fn $name() -> c_int {
            naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "mov x29, sp",
                "str x1, [sp, #24]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "add x1, sp, #24",
                "bl {array}",
                "ldp x29, x30, [sp], #80",
                "ret",
                array = sym $array,
            )
        }
    };
}

variadic_exec!(execl = execl_array);
variadic_exec!(execlp = execlp_array);
variadic_exec!(execle = execle_array);

// ----------------------------------------------------------------------- exit

hook! { fn _exit(status: c_int) -> ! { ops::exiting(); real(status) } }
hook! { fn _Exit(status: c_int) -> ! { ops::exiting(); real(status) } }
hook! { fn quick_exit(status: c_int) -> ! { ops::exiting(); real(status) } }

// ------------------------------------------------------------------ dlmopen()

/// Before `dlmopen`: a new namespace gets a libc of its own, with which it can use any socket out of our sight.
/// Gives the real function.
unsafe extern "C" fn namespace(id: c_long) -> usize {
    const NEW: c_long = -1;
    if id == NEW {
        keep_errno(|| ops::no_more_rings());
    }
    real::dlmopen.get() as usize
}

jump! { fn dlmopen to namespace }

// -------------------------------------------------------------------- seccomp

hook! {
    fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
        if retire::confines_by_prctl(option, a as usize, b as usize) {
            ops::confining();
        }
        real(option, a, b, c, d)
    }
}

// ----------------------------------------------------------------- namespaces

hook! { fn unshare(flags: c_int) -> c_int = dispatch::unshare(flags) }
hook! { fn setns(fd: c_int, kind: c_int) -> c_int = dispatch::setns(fd, kind) }

// --------------------------------------------------------------------- limits

hook! { fn setrlimit(resource: c_uint, new: *const rlimit) -> c_int = limits::prlimit(0, resource, new, null_mut()) }
hook! { fn setrlimit64(resource: c_uint, new: *const rlimit) -> c_int = limits::prlimit(0, resource, new, null_mut()) }
hook! { fn getrlimit(resource: c_uint, old: *mut rlimit) -> c_int = limits::prlimit(0, resource, null(), old) }
hook! { fn getrlimit64(resource: c_uint, old: *mut rlimit) -> c_int = limits::prlimit(0, resource, null(), old) }
hook! {
    fn prlimit(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int
        = limits::prlimit(pid, resource, new, old)
}
hook! {
    fn prlimit64(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int
        = limits::prlimit(pid, resource, new, old)
}

// ------------------------------------------------------------ vfork and clone

// Both may put another process into this one's memory, and are left with a jump: in the child of `vfork` the stack goes on
// to be the caller's, and what `clone` has on the stack is where it expects it. A `clone` that shares nothing is a fork.

/// Where libc's is, found before there is a second process.
unsafe extern "C" fn find_vfork() -> *const core::ffi::c_void {
    keep_errno(ops::about_to_bear);
    real::vfork.get()
}

/// The same.
unsafe extern "C" fn find_clone() -> *const core::ffi::c_void {
    keep_errno(ops::about_to_bear);
    real::clone.get()
}

/// libc's `vfork`.
#[no_mangle]
#[unsafe(naked)]
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn vfork() -> pid_t {
    naked_asm!(
        "mov byte ptr [rip + {guests}], 1",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "jmp rax",
        guests = sym GUESTS,
        find = sym find_vfork,
    )
}

/// libc's `clone`.
#[no_mangle]
#[unsafe(naked)]
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn clone() -> c_int {
    naked_asm!(
        "test edx, {shares}",
        "jne 2f",
        "jmp {forks}",
        "2:",
        "mov byte ptr [rip + {guests}], 1",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        shares = const SHARES,
        forks = sym clones::clone,
        guests = sym GUESTS,
        find = sym find_clone,
    )
}

/// libc's `vfork`.
#[no_mangle]
#[unsafe(naked)]
#[cfg(target_arch = "aarch64")]
unsafe extern "C" fn vfork() -> pid_t {
    naked_asm!(
        "mov w10, #1",
        "adrp x9, {guests}",
        "strb w10, [x9, :lo12:{guests}]",
        "stp x29, x30, [sp, #-16]!",
        "bl {find}",
        "ldp x29, x30, [sp], #16",
        "mov x16, x0",
        "br x16",
        guests = sym GUESTS,
        find = sym find_vfork,
    )
}

/// libc's `clone`.
#[no_mangle]
#[unsafe(naked)]
#[cfg(target_arch = "aarch64")]
unsafe extern "C" fn clone() -> c_int {
    naked_asm!(
        "movz w10, #{low}",
        "movk w10, #{high}, lsl #16",
        "tst w2, w10",
        "b.ne 2f",
        "b {forks}",
        "2:",
        "mov w10, #1",
        "adrp x9, {guests}",
        "strb w10, [x9, :lo12:{guests}]",
        "stp x29, x30, [sp, #-80]!",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "str x6, [sp, #64]",
        "bl {find}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldr x6, [sp, #64]",
        "ldp x29, x30, [sp], #80",
        "br x16",
        low = const SHARES & 0xffff,
        high = const SHARES >> 16,
        forks = sym clones::clone,
        guests = sym GUESTS,
        find = sym find_clone,
    )
}

/// libc's other name of it.
#[no_mangle]
#[unsafe(naked)]
unsafe extern "C" fn __vfork() -> pid_t {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("jmp {to}", to = sym vfork);
    #[cfg(target_arch = "aarch64")]
    naked_asm!("b {to}", to = sym vfork);
}

/// The same.
#[no_mangle]
#[unsafe(naked)]
unsafe extern "C" fn __clone() -> c_int {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("jmp {to}", to = sym clone);
    #[cfg(target_arch = "aarch64")]
    naked_asm!("b {to}", to = sym clone);
}

// ------------------------------------------------------------------ syscall()

/// The numbers that are looked at.
const NUMBERS: usize = 512;

/// The dispatcher does something about the call.
const SERVED: u8 = 1;
/// It may make another process, also in this one's memory.
const BEARS: u8 = 2;

/// What is to be done about each number.
static INTERESTING: [u8; NUMBERS] = {
    let mut table = [0; NUMBERS];
    let mut n = 0;
    while n < NUMBERS {
        if dispatch::interesting(n as c_long) {
            table[n] = SERVED;
        }
        n += 1;
    }
    table[libc::SYS_clone as usize] = BEARS;
    table[libc::SYS_clone3 as usize] = BEARS;
    #[cfg(target_arch = "x86_64")]
    {
        table[libc::SYS_vfork as usize] = BEARS;
        table[libc::SYS_fork as usize] = BEARS;
    }
    table
};

/// libc's `syscall`.
///
/// Most calls are `futex` and `gettid`, so the rest goes on with a jump. It must
/// be a jump also because `vfork` and `clone` return twice, the second time with
/// the stack as they found it.
#[no_mangle]
#[unsafe(naked)]
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn syscall() -> c_long {
    naked_asm!(
        "cmp rdi, {numbers}",
        "jae 2f",
        "lea rax, [rip + {interesting}]",
        "cmp byte ptr [rax + rdi], 0",
        "jne 4f",
        "2:",
        "mov rax, [rip + {real}]",
        "test rax, rax",
        "je 3f",
        "jmp rax",
        "4:",
        "cmp byte ptr [rax + rdi], {bears}",
        "jne 3f",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {is_fork}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jne 5f",
        "mov byte ptr [rip + {guests}], 1",
        "jmp 2b",
        "5:",
        "jmp {forks}",
        "3:",
        "jmp {dispatched}",
        numbers = const NUMBERS,
        bears = const BEARS,
        is_fork = sym clones::is_fork,
        forks = sym clones::syscall,
        guests = sym GUESTS,
        interesting = sym INTERESTING,
        real = sym real::syscall,
        dispatched = sym dispatched,
    )
}

/// libc's `syscall`.
#[no_mangle]
#[unsafe(naked)]
#[cfg(target_arch = "aarch64")]
unsafe extern "C" fn syscall() -> c_long {
    naked_asm!(
        "cmp x0, #{numbers}",
        "b.hs 2f",
        "adrp x9, {interesting}",
        "add x9, x9, :lo12:{interesting}",
        "ldrb w9, [x9, x0]",
        "cbnz w9, 4f",
        "2:",
        "adrp x9, {real}",
        "add x9, x9, :lo12:{real}",
        "ldr x9, [x9]",
        "cbz x9, 3f",
        "br x9",
        "4:",
        "cmp w9, #{bears}",
        "b.ne 3f",
        "stp x29, x30, [sp, #-80]!",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "str x6, [sp, #64]",
        "bl {is_fork}",
        "mov w9, w0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldr x6, [sp, #64]",
        "ldp x29, x30, [sp], #80",
        "tbnz w9, #0, 5f",
        "mov w10, #1",
        "adrp x9, {guests}",
        "strb w10, [x9, :lo12:{guests}]",
        "b 2b",
        "5:",
        "b {forks}",
        "3:",
        "b {dispatched}",
        numbers = const NUMBERS,
        bears = const BEARS,
        is_fork = sym clones::is_fork,
        forks = sym clones::syscall,
        guests = sym GUESTS,
        interesting = sym INTERESTING,
        real = sym real::syscall,
        dispatched = sym dispatched,
    )
}

/// A call whose number is looked at, or one before the real function was found.
unsafe extern "C" fn dispatched(n: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    match ringsock_core::signals::uncancellable(|| dispatch::syscall(n, a, b, c, d, e, f)) {
        Outcome::Bypass => {
            let at = real::syscall.get();
            let at: unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long =
                core::mem::transmute(at);
            at(n, a, b, c, d, e, f)
        }
        served => finish(served),
    }
}
