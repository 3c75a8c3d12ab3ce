//! Faults: what a bad address of the program's comes to, where the library touches it.
//!
//! From before the first connection that moves, a handler of ours stands before the program's for `SIGSEGV` and `SIGBUS`.
//! If the fault was in a [copy](crate::copy), it has that copy fail, and nobody hears of it, as the kernel's own copies fail.
//! All else is the program's: the kernel delivers to ours in the way that the program has chosen (its mask, its stack, its
//! flags), and ours jumps into the program's with the same stack, the same arguments and the same place to return to. A
//! program that has none dies of the signal.
//!
//! Where the program ignores a signal, ours is not there, because images that it starts inherit that; and there is no help
//! for a thread that has it blocked: the kernel kills a process for a fault that it cannot deliver.

use crate::copy;
use crate::ops::Outcome;
use crate::process;
use crate::signals::{kernel_action, Action, LOCK};
use crate::sys::{self, sys};
use core::arch::global_asm;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use libc::{c_int, siginfo_t, ucontext_t};

/// What the program has set: its handler, `SIG_DFL` or `SIG_IGN`, and the flags.
struct Program {
    handler: AtomicUsize,
    flags: AtomicU64,
}

static PROGRAM: [Program; 2] =
    [const { Program { handler: AtomicUsize::new(libc::SIG_DFL), flags: AtomicU64::new(0) } }; 2];
static STANDS: AtomicBool = AtomicBool::new(false);

const RESETHAND: u64 = libc::SA_RESETHAND as u32 as u64;
/// The kernel is told where a handler returns to.
const RESTORER: u64 = 0x0400_0000;

/// Whether ours may stand before the program's handler of `sig`.
pub fn is_one(sig: c_int) -> bool {
    matches!(sig, libc::SIGSEGV | libc::SIGBUS)
}

fn of(sig: c_int) -> &'static Program {
    &PROGRAM[usize::from(sig == libc::SIGBUS)]
}

fn ours() -> usize {
    ringsock_fault_entry as *const () as usize
}

impl Program {
    fn now(&self) -> (usize, u64) {
        (self.handler.load(Relaxed), self.flags.load(Relaxed))
    }
}

/// Before a connection moves.
pub fn stand_by() {
    if STANDS.load(Acquire) || !copy::is_known() {
        return;
    }
    let _g = LOCK.lock();
    if !STANDS.load(Relaxed) {
        for sig in [libc::SIGSEGV, libc::SIGBUS] {
            adopt(sig);
        }
        STANDS.store(true, Release);
    }
}

/// Whether somebody does.
#[inline]
pub fn stands_by() -> bool {
    STANDS.load(Acquire)
}

/// No connection will move any more: the program's handlers are the kernel's again.
pub fn stand_down() {
    let _g = LOCK.lock();
    if !STANDS.swap(false, SeqCst) {
        return;
    }
    for sig in [libc::SIGSEGV, libc::SIGBUS] {
        let mut k = Action::NONE;
        if kernel_action(sig, None, Some(&mut k)).is_ok() && k.handler == ours() {
            let _ = kernel_action(sig, Some(&as_set(k, of(sig).now())), None);
        }
    }
}

/// The action `k`, which is ours, as the program has set it.
fn as_set(k: Action, (handler, flags): (usize, u64)) -> Action {
    Action { handler, flags, restorer: if flags & RESTORER != 0 { k.restorer } else { 0 }, mask: k.mask }
}

/// Puts ours before what the program has set for `sig` in the kernel. Under the lock.
fn adopt(sig: c_int) {
    let mut k = Action::NONE;
    if kernel_action(sig, None, Some(&mut k)).is_err() || k.handler == libc::SIG_IGN {
        return;
    }
    let program = of(sig);
    if k.handler == ours() {
        // `siginterrupt` changes the flags only.
        let (mine, changed) = (program.flags.load(Relaxed), libc::SA_RESTART as u64);
        program.flags.store(mine & !changed | k.flags & changed, Relaxed);
        return;
    }
    program.flags.store(k.flags, Relaxed);
    program.handler.store(k.handler, Relaxed);
    // That it is for one time only is seen to here. And whoever has no handler may have no stack left.
    k.flags = k.flags & !RESETHAND | libc::SA_SIGINFO as u64;
    if k.handler == libc::SIG_DFL {
        k.flags |= libc::SA_ONSTACK as u64;
    }
    #[cfg(target_arch = "x86_64")]
    if k.flags & RESTORER == 0 {
        k.flags |= RESTORER;
        k.restorer = ringsock_fault_return as *const () as usize;
    }
    k.handler = ours();
    let _ = kernel_action(sig, Some(&k), None);
}

/// `sigaction(2)` for one of these signals; `real` is libc's.
///
/// # Safety
/// As for the call.
pub(crate) unsafe fn sigaction(
    sig: c_int,
    act: *const libc::sigaction,
    old: *mut libc::sigaction,
    real: impl Fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int,
) -> c_int {
    // A child of `vfork` sees what its parent has set, and sets its own.
    let home = process::is_active() && !process::is_guest();
    let _g = home.then(|| LOCK.lock());
    let was = of(sig).now();
    let r = real(sig, act, old);
    if home && !act.is_null() && STANDS.load(Relaxed) {
        // What was set is looked up in the kernel: a library behind us (`libjsig`) may have kept it to itself.
        adopt(sig);
    }
    // SAFETY: null, or written by libc just now.
    if let Some(o) = unsafe { old.as_mut() }.filter(|o| r == 0 && o.sa_sigaction == ours()) {
        o.sa_sigaction = was.0;
        o.sa_flags = was.1 as c_int;
        if was.1 & RESTORER == 0 {
            o.sa_restorer = None;
        }
    }
    r
}

/// `signal(3)` and its kin for one of these signals: `real` does it. Returns what `real` returned, as the program knows it.
pub(crate) fn adopting(sig: c_int, real: impl FnOnce() -> usize) -> usize {
    let home = process::is_active() && !process::is_guest();
    let _g = home.then(|| LOCK.lock());
    let was = of(sig).now();
    let r = real();
    if home && STANDS.load(Relaxed) {
        adopt(sig);
    }
    if r == ours() {
        was.0
    } else {
        r
    }
}

/// The system call `rt_sigaction`, made by libc's `syscall()`.
///
/// # Safety
/// As for the call.
pub unsafe fn raw_sigaction(sig: c_int, act: usize, old: usize, size: usize) -> Outcome {
    if !is_one(sig) || !process::is_active() {
        return Outcome::Bypass;
    }
    let home = !process::is_guest();
    let _g = home.then(|| LOCK.lock());
    let was = of(sig).now();
    // SAFETY: the program's arguments, for the kernel to check.
    let r = unsafe { sys!(libc::SYS_rt_sigaction, sig, act, old, size) };
    if home && r.is_ok() && act != 0 && STANDS.load(Relaxed) {
        adopt(sig);
    }
    // SAFETY: null, or written by the kernel just now.
    if let Some(o) = unsafe { (old as *mut Action).as_mut() }.filter(|o| r.is_ok() && o.handler == ours()) {
        *o = as_set(*o, was);
    }
    Outcome::from(r)
}

extern "C" {
    /// What the kernel calls: asks [`arrived`], and returns, or jumps where that says.
    fn ringsock_fault_entry();
    /// Returns from a handler.
    #[cfg(target_arch = "x86_64")]
    fn ringsock_fault_return();
}

/// A fault, or a signal that somebody has sent. Returns the program's handler, or 0: the thread goes on.
///
/// # Safety
/// The arguments are the kernel's.
unsafe extern "C" fn arrived(sig: c_int, info: *mut siginfo_t, context: *mut ucontext_t) -> usize {
    // SAFETY: the kernel's record of the signal and of the registers.
    let (code, registers) = unsafe { ((*info).si_code, &mut (*context).uc_mcontext) };
    // What was sent has a code that is not positive.
    // SAFETY: as above.
    if code > 0 && unsafe { copy::fail(registers) } {
        return 0;
    }
    let program = of(sig);
    let (handler, flags) = program.now();
    let handler = match flags & RESETHAND {
        0 => handler,
        // The first of several threads has it.
        _ => match program.handler.compare_exchange(handler, libc::SIG_DFL, Relaxed, Relaxed) {
            Ok(h) => h,
            Err(now) => now,
        },
    };
    match handler {
        libc::SIG_IGN if code <= 0 => 0,
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: the kernel's own record.
            unsafe { die(sig, info) };
            0
        }
        h => h,
    }
}

/// Has the process end of the signal, as soon as the handler returns, as if it had none.
///
/// # Safety
/// `info` is the kernel's.
#[cold]
unsafe fn die(sig: c_int, info: *mut siginfo_t) {
    // SAFETY: no pointers but to the kernel's own record.
    unsafe {
        if kernel_action(sig, Some(&Action::NONE), None).is_err() {
            let _ = sys!(libc::SYS_kill, sys::pid(), libc::SIGKILL);
        }
        let tid = sys!(libc::SYS_gettid).unwrap_or(0);
        let _ = sys!(libc::SYS_rt_tgsigqueueinfo, sys::pid(), tid, sig, info);
    }
}

#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.ringsock_fault, \"ax\", @progbits",
    ".globl ringsock_fault_entry, ringsock_fault_return",
    ".hidden ringsock_fault_entry, ringsock_fault_return",
    ".type ringsock_fault_entry, @function",
    "ringsock_fault_entry:",
    ".cfi_startproc",
    "push rdi",
    ".cfi_adjust_cfa_offset 8",
    "push rsi",
    ".cfi_adjust_cfa_offset 8",
    "push rdx",
    ".cfi_adjust_cfa_offset 8",
    "call {arrived}",
    "pop rdx",
    ".cfi_adjust_cfa_offset -8",
    "pop rsi",
    ".cfi_adjust_cfa_offset -8",
    "pop rdi",
    ".cfi_adjust_cfa_offset -8",
    "mov r11, rax",
    "xor eax, eax",
    "test r11, r11",
    "jz 10f",
    "jmp r11",
    "10:",
    "ret",
    ".cfi_endproc",
    ".size ringsock_fault_entry, . - ringsock_fault_entry",
    // In these bytes, by which debuggers know it.
    ".balign 16",
    "nop",
    ".type ringsock_fault_return, @function",
    "ringsock_fault_return:",
    ".byte 0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00",
    "syscall",
    ".size ringsock_fault_return, . - ringsock_fault_return",
    ".popsection",
    arrived = sym arrived,
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .text.ringsock_fault, \"ax\", @progbits",
    ".globl ringsock_fault_entry",
    ".hidden ringsock_fault_entry",
    ".type ringsock_fault_entry, @function",
    "ringsock_fault_entry:",
    ".cfi_startproc",
    "stp x29, x30, [sp, #-48]!",
    ".cfi_def_cfa_offset 48",
    ".cfi_offset x29, -48",
    ".cfi_offset x30, -40",
    "stp x0, x1, [sp, #16]",
    "str x2, [sp, #32]",
    "mov x29, sp",
    "bl {arrived}",
    "mov x16, x0",
    "ldp x0, x1, [sp, #16]",
    "ldr x2, [sp, #32]",
    "ldp x29, x30, [sp], #48",
    ".cfi_def_cfa_offset 0",
    ".cfi_restore x29",
    ".cfi_restore x30",
    "cbz x16, 10f",
    "br x16",
    "10:",
    "ret",
    ".cfi_endproc",
    ".size ringsock_fault_entry, . - ringsock_fault_entry",
    ".popsection",
    arrived = sym arrived,
);
