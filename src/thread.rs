//! What a thread knows of itself.
//!
//! A signal handler may run in the middle of anything and may call us again.
//! So while a thread holds a lock of the library (or is in the allocator for
//! it), handlers are put off until it does not: see [`crate::signals`].

use crate::sleepers::Word;
use crate::sys::sys;
use core::cell::Cell;
use core::sync::atomic::{
    compiler_fence, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};
use libc::c_int;

/// A thread's own words.
pub struct Thread {
    tid: Cell<u32>,
    /// How many critical sections it is in, one inside the other.
    depth: Cell<u32>,
    /// A signal was put off; all are blocked.
    deferred: Cell<bool>,
    /// The signal mask to go back to then.
    mask: Cell<u64>,
    /// Handlers that have run.
    pub(crate) handled: AtomicU32,
    /// Those of them without `SA_RESTART`.
    pub(crate) hard: AtomicU32,
    /// Of `handled`, those that had run when its last sleep was over.
    pub(crate) at_wake: Cell<u32>,
    /// Signals that the mask of its call keeps out.
    pub(crate) kept_out: Cell<u64>,
    /// It sleeps, as far as that number goes.
    pub(crate) asleep: Cell<bool>,
    /// The system call in which it sleeps is ended by every signal.
    pub(crate) any: Cell<bool>,
    /// Its last sleep was none: a handler had run before it.
    pub(crate) unslept: Cell<bool>,
    /// It waits for completion channels: see `remote::guard`. 0, or 1 and since when.
    pub(crate) guards: Cell<u64>,
    /// Where it says that it sleeps, see `sleepers`.
    pub(crate) word: Cell<Option<&'static Word>>,
    /// Its call came by `syscall()`, which is no cancellation point.
    pub(crate) uncancellable: Cell<bool>,
    /// What its call holds open, see `pins`.
    pub(crate) held: Cell<usize>,
    /// That is held until the end of a call of several pieces: see `pins::Whole`.
    pub(crate) whole: Cell<bool>,
    /// Where its stack ended when it last was in libc for a copy, see `copy`.
    pub(crate) copying: Cell<usize>,
    /// A call found no memory of the program where its answer was to go, and is to say so.
    pub(crate) faulted: Cell<bool>,
    /// [`OUTSIDE`] while its fds are none of the program's, see `desk::kept`, or 0.
    pub(crate) outside: Cell<u32>,
}

/// No fd has this bit.
pub(crate) const OUTSIDE: u32 = 1 << 31;

/// By which place in a table of the program's fds the calling thread finds what it calls `fd`: behind the end of any table,
/// where that is none of the program's.
#[inline(always)]
pub(crate) fn place_of(fd: c_int) -> usize {
    me(|me| fd as u32 | me.outside.get()) as usize
}

// Where a thread's words lie is told at an offset from the thread pointer that the dynamic linker knows when the
// library is loaded, as it is at the start of a program: without a call for each access, of which each lock makes two.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .tbss,\"awT\",@nobits",
    ".balign 8",
    ".globl ringsock_me",
    ".hidden ringsock_me",
    ".type ringsock_me, @object",
    ".size ringsock_me, {size}",
    "ringsock_me:",
    ".zero {size}",
    ".popsection",
    size = const size_of::<Thread>(),
);

#[cfg(target_arch = "x86_64")]
const _: () = assert!(align_of::<Thread>() <= 8);

#[cfg(not(target_arch = "x86_64"))]
thread_local! {
    // Without a destructor, so that it can be used by handlers and to the thread's very end.
    static ME: Thread = const {
        Thread {
            tid: Cell::new(0),
            depth: Cell::new(0),
            deferred: Cell::new(false),
            mask: Cell::new(0),
            handled: AtomicU32::new(0),
            hard: AtomicU32::new(0),
            at_wake: Cell::new(0),
            kept_out: Cell::new(0),
            asleep: Cell::new(false),
            any: Cell::new(false),
            unslept: Cell::new(false),
            guards: Cell::new(0),
            word: Cell::new(None),
            uncancellable: Cell::new(false),
            held: Cell::new(0),
            whole: Cell::new(false),
            copying: Cell::new(0),
            faulted: Cell::new(false),
            outside: Cell::new(0),
        }
    };
}

/// Calls `f` with the calling thread's words.
#[inline(always)]
pub(crate) fn me<R>(f: impl FnOnce(&Thread) -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        let at: *const Thread;
        // SAFETY: the variable above is as large as a `Thread`, for which zeros are a valid value, and lives as long as
        // the thread, to which it is given alone.
        unsafe {
            core::arch::asm!(
                "mov {at}, qword ptr [rip + ringsock_me@GOTTPOFF]",
                "add {at}, qword ptr fs:0",
                at = out(reg) at,
                options(pure, nomem, nostack),
            );
            f(&*at)
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    ME.with(f)
}

impl Thread {
    #[inline]
    fn id(&self) -> u32 {
        match self.tid.get() {
            0 => self.ask_id(),
            v => v,
        }
    }

    // Not in line, as all that each lock and unlock has in it and hardly ever does: it would be in the way of what it does.
    #[cold]
    #[inline(never)]
    fn ask_id(&self) -> u32 {
        // SAFETY: gettid has no preconditions.
        let v = unsafe { sys!(libc::SYS_gettid) }.unwrap_or(1) as u32;
        self.tid.set(v);
        v
    }

    #[inline(always)]
    fn leave(&self) {
        compiler_fence(SeqCst);
        let depth = self.depth.get() - 1;
        self.depth.set(depth);
        compiler_fence(SeqCst);
        if depth == 0 && self.deferred.get() {
            deliver(self);
        }
    }

    /// Whether it is in a critical section.
    pub(crate) fn is_critical(&self) -> bool {
        self.depth.get() > 0
    }

    /// The thread is about to sleep, perhaps in a critical section: what came there has its handlers. Whoever calls this
    /// undoes what is half done, if one of them jumps out. Gives what [`Thread::wakes_up`] wants.
    #[inline(always)]
    pub(crate) fn falls_asleep(&self) -> u32 {
        let depth = self.depth.replace(0);
        compiler_fence(SeqCst);
        if self.deferred.get() {
            deliver(self);
        }
        depth
    }

    /// It sleeps no more, and the critical section goes on.
    #[inline(always)]
    pub(crate) fn wakes_up(&self, depth: u32) {
        compiler_fence(SeqCst);
        self.depth.set(depth);
    }

    /// Its sleep is over: what handlers run from now on do so behind what it slept for.
    pub(crate) fn wakes(&self) {
        self.at_wake.set(self.handled.load(Relaxed));
        self.asleep.set(false);
    }

    /// A signal was put off, and all are blocked: `mask` is to be put back at the end of the section.
    pub(crate) fn put_off(&self, mask: u64) {
        self.mask.set(mask);
        self.deferred.set(true);
    }
}

/// The calling thread's id, cached.
#[inline]
pub fn tid() -> u32 {
    me(Thread::id)
}

/// After fork: the cached id is the parent's.
pub fn forget_tid() {
    me(|t| t.tid.set(0));
}

/// Begins a critical section; returns the thread's id.
#[inline(always)]
pub(crate) fn enter() -> u32 {
    me(|t| {
        t.depth.set(t.depth.get() + 1);
        compiler_fence(SeqCst);
        t.id()
    })
}

/// Ends a critical section, and lets signals that came in it have their handlers.
#[inline(always)]
pub(crate) fn leave() {
    me(Thread::leave);
}

#[cold]
#[inline(never)]
fn deliver(t: &Thread) {
    t.deferred.set(false);
    let mask = t.mask.get();
    // SAFETY: the mask is 8 readable bytes, as the kernel wants it.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &mask, 0, 8) };
}

/// A critical section, and the id of the thread that is in it.
pub(crate) struct Critical(u32);

impl Critical {
    /// Begins one; it ends when the value is dropped.
    #[inline(always)]
    pub(crate) fn new() -> Critical {
        Critical(enter())
    }
}

/// That the thread is in a critical section, and its id.
#[derive(Clone, Copy)]
pub(crate) struct Within<'a>(pub(crate) u32, core::marker::PhantomData<&'a Critical>);

impl Critical {
    /// Ends it, without a call for that.
    #[inline(always)]
    pub(crate) fn end(self) {
        core::mem::forget(self);
        leave();
    }

    /// For what is done in it.
    #[inline(always)]
    pub(crate) fn within(&self) -> Within<'_> {
        Within(self.0, core::marker::PhantomData)
    }
}

impl Drop for Critical {
    #[inline(always)]
    fn drop(&mut self) {
        leave();
    }
}
