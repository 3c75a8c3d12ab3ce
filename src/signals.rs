//! Signals: handlers that may use the library in the middle of its own work, calls that they interrupt,
//! and threads that are cancelled.
//!
//! A program's handler may do anything to the very connection whose lock its thread holds. It could neither
//! wait for that lock nor do without it. So handlers are installed behind one of ours ([`entry`]), which
//! looks whether the thread is in a critical section. If so, it sends the signal to the thread again, blocks
//! all signals there, and returns; at the end of the section the mask is put back, and the kernel delivers
//! what has come. No handler ever sees a lock held, or jumps out of a section that is half done.
//!
//! It also counts the handlers that have run, so that a call of ours that has not got round to sleeping in
//! the kernel ends with `EINTR` where the kernel's call would have. The last moment before the sleep is
//! closed by [`sleep`]: where the handler finds the thread between the look at the count and the system
//! call, it moves it past the call.
//!
//! Handlers of faults are none of our business, but for what [`crate::fault`] does; nor are those that a program
//! installs by system calls of its own: those that interrupt a critical section get `EAGAIN` from the
//! connection.

use crate::sync::Lock;
use crate::sys::{sys, SysResult};
use crate::thread::{me, Thread};
use crate::{copy, fault, process};
use core::arch::global_asm;
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*};
use libc::{c_int, c_long, siginfo_t, sigset_t};

mod cancel;
pub use cancel::{any_cancelled, cancelling, point, uncancellable};

/// One more than the highest signal.
const SIGNALS: usize = 65;
/// All signals but faults, which cannot be put off.
const MAY_BLOCK: u64 = !(bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS));

/// The program's handlers, and the flags that it gave.
static HANDLERS: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(0) }; SIGNALS];
static FLAGS: [AtomicU32; SIGNALS] = [const { AtomicU32::new(0) }; SIGNALS];
/// Guards changes of the two together with the kernel's.
pub(crate) static LOCK: Lock = Lock::new();

const fn bit(sig: c_int) -> u64 {
    1 << (sig - 1)
}

/// An action as the kernel has it, on x86-64 and on aarch64 (for whose 32-bit programs there is a restorer:
/// `include/linux/signal_types.h`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Action {
    pub(crate) handler: usize,
    pub(crate) flags: u64,
    pub(crate) restorer: usize,
    pub(crate) mask: u64,
}

impl Action {
    pub(crate) const NONE: Action = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
}

pub(crate) fn kernel_action(sig: c_int, new: Option<&Action>, old: Option<&mut Action>) -> SysResult {
    let new = new.map_or(core::ptr::null(), |a| a as *const Action);
    let old = old.map_or(core::ptr::null_mut(), |a| a as *mut Action);
    // SAFETY: both are null or valid; 8 is the size of the kernel's mask.
    unsafe { sys!(libc::SYS_rt_sigaction, sig, new, old, 8) }
}

/// Whether we stand before the program's handlers of `sig`.
fn is_ours(sig: c_int) -> bool {
    (1..SIGNALS as c_int).contains(&sig) && MAY_BLOCK & bit(sig) != 0 && process::is_active() && !process::is_guest()
}

fn is_handler(h: usize) -> bool {
    h != libc::SIG_DFL && h != libc::SIG_IGN && h != libc::SIG_ERR && h != entry as *const () as usize
}

/// `sigaction(2)`; `real` is libc's.
///
/// # Safety
/// As for the call.
pub unsafe fn sigaction(
    sig: c_int,
    act: *const libc::sigaction,
    old: *mut libc::sigaction,
    real: impl Fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int,
) -> c_int {
    if fault::is_one(sig) {
        // SAFETY: the caller's promise.
        return unsafe { fault::sigaction(sig, act, old, real) };
    }
    if !is_ours(sig) {
        let r = real(sig, act, old);
        if r == 0 {
            // A child of `vfork` sees what its parent has installed.
            // SAFETY: written by libc just now, unless null.
            unsafe { show(sig, old) };
        }
        return r;
    }
    let i = sig as usize;
    let _g = LOCK.lock();
    let was = (HANDLERS[i].load(Relaxed), FLAGS[i].load(Relaxed));
    // SAFETY: null or readable, by the caller's promise.
    let r = match unsafe { act.as_ref() } {
        Some(a) if is_handler(a.sa_sigaction) => {
            let mut a = *a;
            HANDLERS[i].store(a.sa_sigaction, Relaxed);
            FLAGS[i].store(a.sa_flags as u32, Relaxed);
            a.sa_sigaction = entry as *const () as usize;
            a.sa_flags |= libc::SA_SIGINFO;
            let r = real(sig, &a, old);
            if r != 0 {
                HANDLERS[i].store(was.0, Relaxed);
                FLAGS[i].store(was.1, Relaxed);
            }
            r
        }
        _ => real(sig, act, old),
    };
    if r == 0 {
        // SAFETY: as above.
        unsafe { show_as(old, was) };
    }
    r
}

/// Puts the program's own handler where libc has written ours.
///
/// # Safety
/// `old` is null or valid.
unsafe fn show(sig: c_int, old: *mut libc::sigaction) {
    if let Some(i) = usize::try_from(sig).ok().filter(|i| *i < SIGNALS) {
        // SAFETY: the caller's promise.
        unsafe { show_as(old, (HANDLERS[i].load(Relaxed), FLAGS[i].load(Relaxed))) };
    }
}

unsafe fn show_as(old: *mut libc::sigaction, was: (usize, u32)) {
    // SAFETY: null or valid, by the caller's promise.
    if let Some(o) = unsafe { old.as_mut() }.filter(|o| o.sa_sigaction == entry as *const () as usize) {
        o.sa_sigaction = was.0;
        o.sa_flags = o.sa_flags & !libc::SA_SIGINFO | was.1 as c_int & libc::SA_SIGINFO;
    }
}

/// `signal(3)` and its kin, which have libc install a handler in a way of their own: `real` does it, and we
/// step before it. Returns what `real` returned, as the program knows it.
pub fn adopting(sig: c_int, real: impl FnOnce() -> usize) -> usize {
    if fault::is_one(sig) {
        return fault::adopting(sig, real);
    }
    if !is_ours(sig) {
        return real();
    }
    let i = sig as usize;
    let _g = LOCK.lock();
    let was = HANDLERS[i].load(Relaxed);
    let r = real();
    let mut k = Action::NONE;
    if kernel_action(sig, None, Some(&mut k)).is_ok() {
        if is_handler(k.handler) {
            HANDLERS[i].store(k.handler, Relaxed);
            FLAGS[i].store(k.flags as u32, Relaxed);
            k.handler = entry as *const () as usize;
            k.flags |= libc::SA_SIGINFO as u64;
            let _ = kernel_action(sig, Some(&k), None);
        } else if k.handler == entry as *const () as usize {
            // `siginterrupt` changes the flags only.
            let keep = FLAGS[i].load(Relaxed) & libc::SA_SIGINFO as u32;
            FLAGS[i].store(k.flags as u32 & !(libc::SA_SIGINFO as u32) | keep, Relaxed);
        }
    }
    if r == entry as *const () as usize {
        was
    } else {
        r
    }
}

/// What the kernel calls instead of the program's handler.
unsafe extern "C" fn entry(sig: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let i = sig as usize % SIGNALS;
    let (handler, flags) = (HANDLERS[i].load(Relaxed), FLAGS[i].load(Relaxed) as c_int);
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel's arguments.
    let put_off = me(|t| t.is_critical() && unsafe { put_off(t, sig, info, context, flags) });
    if put_off || !is_handler(handler) {
        return;
    }
    crate::remote::interrupted();
    crate::pins::let_go();
    me(|t| {
        // SAFETY: the kernel's argument.
        if t.asleep.get() && unsafe { has_woken(context) } {
            t.wakes();
        }
        if t.kept_out.get() & bit(sig) != 0 {
            return;
        }
        t.handled.fetch_add(1, Relaxed);
        if flags & libc::SA_RESTART == 0 {
            t.hard.fetch_add(1, Relaxed);
        }
        if flags & libc::SA_RESTART == 0 || t.any.get() {
            // SAFETY: the kernel's argument.
            unsafe { skip_sleep(context) };
        }
    });
    // The handler may sleep in calls of its own. Which handlers run within it is nothing to the call that it has interrupted.
    let sleep = me(|t| (t.asleep.replace(false), t.at_wake.get(), t.any.replace(false), t.kept_out.replace(0)));
    let counts = me(|t| (t.handled.load(Relaxed), t.hard.load(Relaxed)));
    // SAFETY: the program gave this function for a handler. Without `SA_SIGINFO` it looks at fewer arguments.
    unsafe {
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = core::mem::transmute(handler);
        handler(sig, info, context.cast());
    }
    me(|t| {
        t.asleep.set(sleep.0);
        t.at_wake.set(sleep.1);
        t.any.set(sleep.2);
        t.kept_out.set(sleep.3);
        t.handled.store(counts.0, Relaxed);
        t.hard.store(counts.1, Relaxed);
    });
}

/// Has the signal come again when the critical section is over. False: it cannot be kept.
///
/// # Safety
/// The arguments are the kernel's.
#[cold]
unsafe fn put_off(t: &Thread, sig: c_int, info: *mut siginfo_t, context: *mut libc::ucontext_t, flags: c_int) -> bool {
    // SAFETY: the kernel's own mask lies there, in 8 bytes.
    let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
    let all = MAY_BLOCK;
    let mut now = 0u64;
    // A child of `vfork` may be here too: ask for both ids.
    // SAFETY: no pointers but to our own words and the kernel's own record.
    unsafe {
        let _ = sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &all, &mut now, 8);
        let (pid, tid) = (sys!(libc::SYS_getpid).unwrap_or(0), sys!(libc::SYS_gettid).unwrap_or(0));
        if flags & libc::SA_RESETHAND != 0 {
            // The kernel has reset it already; it is to be delivered once.
            let mut k = Action::NONE;
            if kernel_action(sig, None, Some(&mut k)).is_ok() && k.handler == libc::SIG_DFL {
                k.handler = entry as *const () as usize;
                let _ = kernel_action(sig, Some(&k), None);
            }
        }
        if sys!(libc::SYS_rt_tgsigqueueinfo, pid, tid, sig, info).is_err() {
            let _ = sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &now, 0, 8);
            return false;
        }
    }
    // Of handlers that came one upon the other the first one ends last, and knows what was before all.
    t.put_off(*mask);
    *mask |= all;
    true
}

/// While it lives no signal comes to this thread, but faults.
pub(crate) struct Blocked(u64);

impl Blocked {
    pub(crate) fn new() -> Blocked {
        let (all, mut old) = (MAY_BLOCK, 0u64);
        // SAFETY: both masks are 8 bytes, as the kernel wants them.
        let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, &all, &mut old, 8) };
        Blocked(old)
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &self.0, 0, 8) };
    }
}

// ------------------------------------------------------------------ sleeping

/// How many handlers had run in the thread when its call began.
#[derive(Debug, Clone, Copy)]
pub struct Since {
    handled: u32,
    hard: u32,
}

impl Since {
    /// A call begins.
    #[inline]
    pub fn now() -> Since {
        me(|t| Since { handled: t.handled.load(Relaxed), hard: t.hard.load(Relaxed) })
    }

    /// As it was when the thread's last sleep was over, for what it waited for or otherwise. A handler that ran after that,
    /// but before the thread did, found what was waited for there already.
    pub fn at_wake() -> Since {
        me(|t| Since { handled: t.at_wake.get(), hard: t.hard.load(Relaxed) })
    }

    /// The first bytes are transferred, by who had looked last when it was `then`. Handlers that ran before and let the call
    /// go on did so with a call that had not begun. (One that came while the bytes were taken had to wait for that.)
    pub fn begun(&mut self, then: Since) {
        self.handled = then.handled;
    }

    /// Whether a handler has run meanwhile that ends a call: one without `SA_RESTART`, or, with `any`, any.
    pub fn is_over(&self, any: bool) -> bool {
        let now = Since::now();
        now.hard != self.hard || any && now.handled != self.handled
    }

    /// What a wait has left of its time (not positive: it looks, or waits for ever) when so much was spent on what had to come
    /// first. If any handler has run meanwhile that ends the wait, not the time.
    pub fn left(&self, timeout_ns: i64, spent: i64) -> i64 {
        if timeout_ns > 0 && !self.is_over(true) {
            (timeout_ns - spent).max(0)
        } else {
            timeout_ns
        }
    }
}

/// From where on handlers end a call that began at `begun`, and has brought connections home until now. What only `mask` lets
/// in has not come yet; what it keeps out came before the call.
#[inline]
pub fn since(begun: Since, mask: *const sigset_t) -> Since {
    if mask.is_null() {
        begun
    } else {
        Since::now()
    }
}

/// For as long as a call waits with a signal mask: what that keeps out has come before the call, as far as the program can know,
/// and ends nothing.
pub struct Masked {
    was: u64,
}

impl Masked {
    /// Fails where the mask cannot be read.
    pub fn new(mask: *const sigset_t) -> Result<Masked, copy::Fault> {
        // SAFETY: any bits are a mask.
        let bits = unsafe { copy::read(mask.cast::<u64>()) }?;
        Ok(Masked { was: me(|t| t.kept_out.replace(bits)) })
    }
}

impl Drop for Masked {
    fn drop(&mut self) {
        me(|t| t.kept_out.set(self.was));
    }
}

/// How a system call may sleep.
pub struct Sleep<'a> {
    /// When the program's call began.
    pub since: Since,
    /// Every handler ends it, also one with `SA_RESTART`.
    pub any: bool,
    /// Called if the thread does not come back: it is cancelled, or a handler jumps out.
    pub if_left: &'a mut dyn FnMut(),
}

impl Sleep<'_> {
    /// The same, for one of several attempts.
    pub fn again(&mut self) -> Sleep<'_> {
        Sleep { since: self.since, any: self.any, if_left: &mut *self.if_left }
    }
}

/// A system call that may sleep as `how` says, or that does not sleep.
///
/// # Safety
/// As for the system call. If it may sleep, no lock is held.
pub unsafe fn call(how: Option<Sleep>, n: c_long, args: [usize; 6]) -> SysResult {
    match how {
        // SAFETY: the caller's promise.
        Some(s) => unsafe { sleep(n, args, s) },
        // SAFETY: the caller's promise.
        None => unsafe { crate::sys::syscall6(n, args[0], args[1], args[2], args[3], args[4], args[5]) },
    }
}

/// A system call's number and arguments, for the assembly below.
#[repr(C)]
struct Call([usize; 7]);

/// What [`ringsock_sleep`] returns for a call that it has not made, or that is not to be made again. No error of the kernel's
/// that a program sees has this number.
const NOT_MADE: isize = -512;

extern "C" {
    /// Makes the system call unless `*count != seen`.
    fn ringsock_sleep(call: *const Call, count: *const u32, seen: u32) -> isize;
    /// From here ...
    static ringsock_sleep_look: u8;
    /// ... to before here a handler leaves the thread that is not to sleep any more ...
    static ringsock_sleep_done: u8;
    /// ... by going on here.
    static ringsock_sleep_ended: u8;
}

#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.ringsock_sleep, \"ax\", @progbits",
    ".globl ringsock_sleep, ringsock_sleep_look, ringsock_sleep_done, ringsock_sleep_ended",
    ".hidden ringsock_sleep, ringsock_sleep_look, ringsock_sleep_done, ringsock_sleep_ended",
    ".type ringsock_sleep, @function",
    "ringsock_sleep:",
    ".cfi_startproc",
    "mov rcx, rdi",
    "ringsock_sleep_look:",
    "cmp dword ptr [rsi], edx",
    "jne ringsock_sleep_ended",
    "mov rax, [rcx]",
    "mov rdi, [rcx + 8]",
    "mov rsi, [rcx + 16]",
    "mov rdx, [rcx + 24]",
    "mov r10, [rcx + 32]",
    "mov r8, [rcx + 40]",
    "mov r9, [rcx + 48]",
    "syscall",
    "ringsock_sleep_done:",
    "ret",
    "ringsock_sleep_ended:",
    "mov rax, {not_made}",
    "ret",
    ".cfi_endproc",
    ".size ringsock_sleep, . - ringsock_sleep",
    ".popsection",
    not_made = const NOT_MADE,
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .text.ringsock_sleep, \"ax\", @progbits",
    ".globl ringsock_sleep, ringsock_sleep_look, ringsock_sleep_done, ringsock_sleep_ended",
    ".hidden ringsock_sleep, ringsock_sleep_look, ringsock_sleep_done, ringsock_sleep_ended",
    ".type ringsock_sleep, @function",
    "ringsock_sleep:",
    ".cfi_startproc",
    "mov x9, x0",
    "ringsock_sleep_look:",
    "ldr w10, [x1]",
    "cmp w10, w2",
    "b.ne ringsock_sleep_ended",
    "ldp x8, x0, [x9]",
    "ldp x1, x2, [x9, #16]",
    "ldp x3, x4, [x9, #32]",
    "ldr x5, [x9, #48]",
    "svc #0",
    "ringsock_sleep_done:",
    "ret",
    "ringsock_sleep_ended:",
    "mov x0, #{not_made}",
    "ret",
    ".cfi_endproc",
    ".size ringsock_sleep, . - ringsock_sleep",
    ".popsection",
    not_made = const NOT_MADE,
);

/// A handler has interrupted the thread just before it sleeps, or in a sleep that the kernel would go on
/// with: it is not to sleep.
///
/// # Safety
/// `context` is what the kernel gave to a handler.
unsafe fn skip_sleep(context: *mut libc::ucontext_t) {
    // SAFETY: the kernel's record of the registers.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        let pc = &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize];
        #[cfg(target_arch = "aarch64")]
        let pc = &mut (*context).uc_mcontext.pc;
        let at = *pc as usize;
        if ((&raw const ringsock_sleep_look) as usize..(&raw const ringsock_sleep_done) as usize).contains(&at) {
            *pc = (&raw const ringsock_sleep_ended) as usize as _;
        }
    }
}

/// Whether the sleep was over, and not for the handler's sake, before the thread came to the handler.
///
/// # Safety
/// As for [`skip_sleep`].
unsafe fn has_woken(context: *mut libc::ucontext_t) -> bool {
    // SAFETY: the kernel's record of the registers.
    let (at, result) = unsafe {
        let c = &(*context).uc_mcontext;
        #[cfg(target_arch = "x86_64")]
        let of = (c.gregs[libc::REG_RIP as usize] as usize, c.gregs[libc::REG_RAX as usize] as isize);
        #[cfg(target_arch = "aarch64")]
        let of = (c.pc as usize, c.regs[0] as isize);
        of
    };
    at == (&raw const ringsock_sleep_done) as usize && result >= 0
}

/// A piece of work to be done if the thread never comes back from its sleep.
#[repr(C)]
struct Cleanup {
    routine: unsafe extern "C" fn(*mut c_void),
    arg: *mut c_void,
    canceltype: c_int,
    prev: *mut Cleanup,
}

extern "C" {
    fn _pthread_cleanup_push(buffer: *mut Cleanup, routine: unsafe extern "C" fn(*mut c_void), arg: *mut c_void);
    fn _pthread_cleanup_pop(buffer: *mut Cleanup, execute: c_int);
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

const PTHREAD_CANCEL_ASYNCHRONOUS: c_int = 1;

struct Undo<'a> {
    undo: &'a mut dyn FnMut(),
    /// The cancel type to go back to; -1: it was not changed.
    kind: c_int,
}

unsafe extern "C" fn undo(arg: *mut c_void) {
    // SAFETY: `sleep`'s own record, in a frame that is being left and still there.
    let u = unsafe { &mut *arg.cast::<Undo>() };
    (u.undo)();
    crate::pins::let_go();
    if u.kind >= 0 {
        // SAFETY: no pointers.
        unsafe { pthread_setcanceltype(u.kind, core::ptr::null_mut()) };
    }
}

/// Makes a system call that may sleep, and in which the thread may be cancelled. No lock may be held. A critical section, in
/// which the caller may be so that no handler jumps out of it before it sleeps, is left for that time.
///
/// `EINTR` if a handler has run that ends it, see [`Sleep`], although it was before the system call.
///
/// # Safety
/// As for the system call.
pub unsafe fn sleep(n: c_long, args: [usize; 6], how: Sleep) -> SysResult {
    let Sleep { since, any, if_left } = how;
    let call = Call([n as usize, args[0], args[1], args[2], args[3], args[4], args[5]]);
    let mut was = false;
    let (count, seen, cancellable) = me(|t| {
        was = t.any.replace(any);
        let hard = t.hard.load(Relaxed) != since.hard;
        // With the first bytes those that let the call go on are forgotten ([`Since::begun`]), but not those that end it.
        let seen = if any && hard { t.handled.load(Relaxed).wrapping_sub(1) } else { since.handled };
        let (count, seen) = if any { (&t.handled, seen) } else { (&t.hard, since.hard) };
        // Where there is no other thread there is nobody to cancel this one. (A handler may jump out all the same.)
        (count.as_ptr().cast_const(), seen, !t.uncancellable.get() && crate::process::has_threads())
    });
    let mut u = Undo { undo: if_left, kind: -1 };
    let mut buffer = Cleanup { routine: undo, arg: core::ptr::null_mut(), canceltype: 0, prev: core::ptr::null_mut() };
    // SAFETY: `buffer` and `u` live until the pop; the counter is this thread's own; the caller vouches for
    // the system call's arguments. Nothing here needs to be dropped.
    let r = unsafe {
        _pthread_cleanup_push(&mut buffer, undo, (&raw mut u).cast());
        let depth = me(Thread::falls_asleep);
        if cancellable {
            pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &mut u.kind);
        }
        me(|t| t.asleep.set(true));
        let r = ringsock_sleep(&call, count, seen);
        me(|t| t.asleep.get().then(|| t.wakes()));
        if cancellable {
            pthread_setcanceltype(u.kind, core::ptr::null_mut());
        }
        me(|t| t.wakes_up(depth));
        _pthread_cleanup_pop(&mut buffer, 0);
        r
    };
    me(|t| {
        t.any.set(was);
        t.unslept.set(r == NOT_MADE);
    });
    result(r)
}

/// Whether the thread's last [`sleep`] came to its system call. Otherwise a handler had run before it, and nobody has asked the
/// kernel.
pub fn has_slept() -> bool {
    me(|t| !t.unslept.get())
}

/// The same for the only thread of a program, which nobody can cancel, and a call that handlers with `SA_RESTART` do not end.
/// `if_left(arg)` is called if a handler jumps out.
///
/// # Safety
/// As for [`sleep`]; `arg` is what `if_left` wants, until this returns.
#[inline(always)]
pub unsafe fn sleep_alone(
    n: c_long,
    args: [usize; 6],
    since: Since,
    if_left: unsafe extern "C" fn(*mut c_void),
    arg: *mut c_void,
) -> SysResult {
    let call = Call([n as usize, args[0], args[1], args[2], args[3], args[4], args[5]]);
    let mut buffer = MaybeUninit::<Cleanup>::uninit();
    // SAFETY: `buffer` lives until the pop, and the push fills in what that looks at; the counter is this thread's own; the
    // caller vouches for the system call's arguments. Nothing here needs to be dropped.
    let r = unsafe {
        _pthread_cleanup_push(buffer.as_mut_ptr(), if_left, arg);
        let r = me(|t| {
            let depth = t.falls_asleep();
            let r = ringsock_sleep(&call, t.hard.as_ptr(), since.hard);
            t.wakes_up(depth);
            r
        });
        _pthread_cleanup_pop(buffer.as_mut_ptr(), 0);
        r
    };
    result(r)
}

/// What a system call has returned.
#[inline(always)]
fn result(r: isize) -> SysResult {
    if r == NOT_MADE {
        Err(libc::EINTR)
    } else if (-4095..0).contains(&r) {
        Err(-r as i32)
    } else {
        Ok(r as usize)
    }
}

/// In a forked child: whoever held the lock is not here.
pub fn reset_after_fork() {
    LOCK.reset_after_fork();
    cancel::reset_after_fork();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handler of a signal that the call's mask keeps out runs on the way to its sleep.
    #[test]
    fn what_a_mask_keeps_out_ends_nothing() {
        extern "C" fn nothing(_: c_int) {}
        // SAFETY: all zero is an action; the handler is one.
        let old = unsafe {
            let (mut a, mut old): (libc::sigaction, libc::sigaction) = core::mem::zeroed();
            a.sa_sigaction = entry as *const () as usize;
            a.sa_flags = libc::SA_SIGINFO;
            HANDLERS[libc::SIGUSR2 as usize].store(nothing as *const () as usize, Relaxed);
            assert_eq!(libc::sigaction(libc::SIGUSR2, &a, &mut old), 0);
            old
        };
        let ts = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        for kept_out in [false, true] {
            let mask = if kept_out { bit(libc::SIGUSR2) } else { 0 };
            let masked = Masked::new((&raw const mask).cast()).unwrap();
            let since = Since::now();
            // SAFETY: no pointers.
            unsafe { libc::raise(libc::SIGUSR2) };
            let how = Sleep { since, any: true, if_left: &mut || () };
            // SAFETY: `ts` is readable.
            let r = unsafe { sleep(libc::SYS_nanosleep, [&raw const ts as usize, 0, 0, 0, 0, 0], how) };
            assert_eq!(r.is_ok(), kept_out);
            drop(masked);
            assert_eq!(me(|t| t.kept_out.get()), 0);
        }
        assert!(Masked::new(core::ptr::without_provenance::<sigset_t>(8)).is_err(), "no mask at all");
        HANDLERS[libc::SIGUSR2 as usize].store(0, Relaxed);
        // SAFETY: what was there before.
        unsafe { libc::sigaction(libc::SIGUSR2, &old, core::ptr::null_mut()) };
    }

    /// The handler runs by the mask of a call that looks once, which looks again because a connection moves meanwhile.
    #[test]
    fn a_handler_ends_a_look_in_which_a_connection_moves() {
        use crate::io::tests::{armed, know};
        use crate::ops::{poll, Outcome};
        use std::os::fd::AsRawFd;
        static MOVES: AtomicUsize = AtomicUsize::new(0);
        static TIMES: AtomicUsize = AtomicUsize::new(0);
        const SIGNAL: c_int = libc::SIGVTALRM;
        extern "C" fn moves(_: c_int) {
            TIMES.fetch_add(1, SeqCst);
            // SAFETY: a record of the arena, which lives for ever.
            unsafe { &*(MOVES.load(SeqCst) as *const crate::conn::Conn) }.set_phase(crate::conn::Phase::Managed);
        }
        let slot: &crate::layout::Slot = Box::leak(Box::default());
        let (conn, ours, _theirs) = armed(slot);
        conn.set_phase(crate::conn::Phase::Raw);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        MOVES.store(conn as *const _ as usize, SeqCst);
        HANDLERS[SIGNAL as usize].store(moves as *const () as usize, Relaxed);
        let (none, mine) = (0u64, bit(SIGNAL));
        let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: all zero is an action; the handler is one; all masks are 8 bytes, as the kernel wants them, and all pointers
        // to what is here.
        let looks = unsafe {
            let (mut a, mut old): (libc::sigaction, libc::sigaction) = core::mem::zeroed();
            a.sa_sigaction = entry as *const () as usize;
            a.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(SIGNAL, &a, &mut old), 0);
            let _ = sys!(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const mine, 0, 8);
            libc::raise(SIGNAL);
            let looks = [(); 2].map(|()| poll(&mut p, 1, 0, (&raw const none).cast()));
            let _ = sys!(libc::SYS_rt_sigprocmask, libc::SIG_UNBLOCK, &raw const mine, 0, 8);
            libc::sigaction(SIGNAL, &old, core::ptr::null_mut());
            looks
        };
        HANDLERS[SIGNAL as usize].store(0, Relaxed);
        crate::table::take(fd);
        conn.set_phase(crate::conn::Phase::Closed);
        assert_eq!(TIMES.load(SeqCst), 1);
        assert_eq!(looks, [Outcome::Fail(libc::EINTR), Outcome::Done(0)]);
    }

    /// D's garbage collector stops threads by a handler with `SA_RESTART` that waits for a signal whose handler has none.
    #[test]
    fn a_handler_within_a_handler_ends_no_call() {
        extern "C" fn outer(_: c_int) {
            // SAFETY: no pointers.
            unsafe { libc::raise(libc::SIGWINCH) };
        }
        extern "C" fn inner(_: c_int) {}
        let signals = [
            (libc::SIGURG, outer as *const () as usize, libc::SA_RESTART),
            (libc::SIGWINCH, inner as *const () as usize, 0),
        ];
        let old = signals.map(|(sig, handler, flags)| {
            HANDLERS[sig as usize].store(handler, Relaxed);
            FLAGS[sig as usize].store(flags as _, Relaxed);
            // SAFETY: all zero is an action; the handler is one.
            unsafe {
                let (mut a, mut old): (libc::sigaction, libc::sigaction) = core::mem::zeroed();
                a.sa_sigaction = entry as *const () as usize;
                a.sa_flags = libc::SA_SIGINFO | flags;
                assert_eq!(libc::sigaction(sig, &a, &mut old), 0);
                old
            }
        });
        let run = |sig| {
            let since = Since::now();
            // SAFETY: no pointers.
            unsafe { libc::raise(sig) };
            (since.is_over(false), since.is_over(true))
        };
        assert_eq!(run(libc::SIGWINCH), (true, true), "without SA_RESTART");
        assert_eq!(run(libc::SIGURG), (false, true), "with it, and one without within");
        for ((sig, ..), old) in signals.iter().zip(old) {
            HANDLERS[*sig as usize].store(0, Relaxed);
            // SAFETY: what was there before.
            unsafe { libc::sigaction(*sig, &old, core::ptr::null_mut()) };
        }
    }

    /// One without `SA_RESTART` runs on the way to the first bytes of a call, which are there, and waits for more.
    #[test]
    fn what_ends_a_call_ends_it_behind_its_first_bytes() {
        let ts = libc::timespec { tv_sec: 20, tv_nsec: 0 };
        let wait = |since| {
            let how = Sleep { since, any: true, if_left: &mut || () };
            // SAFETY: `ts` is readable.
            unsafe { sleep(libc::SYS_nanosleep, [&raw const ts as usize, 0, 0, 0, 0, 0], how) }
        };
        let mut since = Since::now();
        me(|t| {
            t.handled.fetch_add(1, Relaxed);
            t.hard.fetch_add(1, Relaxed);
        });
        since.begun(Since::now());
        let began = crate::sync::now_ns();
        assert_eq!(wait(since), Err(libc::EINTR));
        assert!(crate::sync::now_ns() - began < 10_000_000_000, "it has slept");
    }
}
