//! The beginning and the end of the background thread.
//!
//! It ends when it has nothing to do. With a second thread the kernel does each call of the program that is about an fd a
//! little slower, and libc those that may wait. The next connection that has something to gain starts another.
//!
//! It stays where the program has threads of its own, and nothing to gain; while a peer may come (a connection that is looked
//! for, links); while anything is under way; while an operator has switched the library off; and for good where RDMA was used,
//! or the process has had children (see [`bear`]). While there is none an operator hears what is said where none ever was:
//! nothing is on a ring.

use super::*;
use std::os::unix::fs::MetadataExt;

/// 0: there is none, 1: starting, 2: running, 3: cannot be started, or has ended for good.
pub(super) static STATE: AtomicU32 = AtomicU32::new(0);
/// The thread is to end.
pub(super) static END: AtomicBool = AtomicBool::new(false);
/// The id of the thread, or of the last one.
static TID: AtomicU32 = AtomicU32::new(0);
/// 1: a thread that had nothing to do is about to be gone. The next one waits for that.
static LEAVES: AtomicU32 = AtomicU32::new(0);
/// What it has left to the next one, or null.
pub(super) static LEFT: AtomicPtr<Bg> = AtomicPtr::new(core::ptr::null_mut());
/// How often one has gone.
static RESTS: AtomicU32 = AtomicU32::new(0);
/// There ever was one, here or in the process that this is a copy of.
static STARTED: AtomicBool = AtomicBool::new(false);
/// The process has had children: programs that they become ask a thread of ours for what they have inherited.
static BEARS: AtomicBool = AtomicBool::new(false);

/// A thread that has nothing to do waits for something for so long, twice as long after each time that it did not come, ...
const REST_AFTER_NS: i64 = 50 * MS;
/// ... so many times.
const REST_DOUBLINGS: u32 = 9;
/// What a thread of the library's has for a stack.
const STACK_BYTES: usize = 512 << 10;
/// How long a call that starts the thread waits until it has begun.
const START_NS: i64 = 100 * MS;

/// Whether there is the thread.
pub fn is_there() -> bool {
    STATE.load(Relaxed) == 2
}

/// Whether there can be no such thread.
pub(super) fn is_impossible() -> bool {
    STATE.load(SeqCst) == 3 && !END.load(SeqCst)
}

/// Whether there is the thread, and beside it, its clerk and the caller no other.
pub fn is_only_other() -> bool {
    TID.load(SeqCst) != 0 && threads() == 2 + u64::from(desk::has_clerk())
}

/// Whether the process has no thread beside the caller but the library's. (Without `/proc`: whether the program never had
/// another one.)
pub fn is_last() -> bool {
    match threads() {
        0 => !crate::process::has_threads(),
        n => n == 1 || is_only_other(),
    }
}

/// Whether there are, beside the main thread, only it, which calls this, and its clerk.
pub(super) fn is_all_but_main() -> bool {
    threads() == 2 + u64::from(desk::has_clerk())
}

/// Whether a thread is it, or its clerk.
pub(super) fn is_ours(tid: u32) -> bool {
    tid == TID.load(SeqCst) || desk::is_clerk(tid)
}

/// How many bytes of addresses the library's threads take, or have left: their stacks, and what libc's `malloc` reserves for a
/// second thread (`HEAP_MAX_SIZE`).
pub fn mapped() -> u64 {
    const RESERVED: u64 = 64 << 20;
    if STARTED.load(Relaxed) {
        RESERVED + 2 * STACK_BYTES as u64
    } else {
        0
    }
}

/// How many threads the process has; 0: that is not known.
fn threads() -> u64 {
    // Besides `.` and `..`.
    std::fs::metadata("/proc/self/task").map_or(0, |m| m.nlink().saturating_sub(2))
}

/// Before the process has a child, which may become a program that asks for a connection: if there ever was a thread there is
/// one from now on. Waits until it has begun.
pub fn bear() {
    BEARS.store(true, SeqCst);
    if STATE.load(SeqCst) == 0 && RESTS.load(SeqCst) > 0 {
        start();
    }
}

/// In a forked child: there is none.
pub(super) fn reset_after_fork() {
    for word in [&STATE, &TID, &LEAVES, &RESTS] {
        word.store(0, Relaxed);
    }
    LEFT.store(core::ptr::null_mut(), Relaxed);
    BEARS.store(false, Relaxed);
}

/// Ends the thread, for good: nothing moves to a ring any more. Waits until it is gone, for a second at most.
pub fn end() {
    END.store(true, SeqCst);
    let _ = STATE.compare_exchange(0, 3, SeqCst, SeqCst);
    bell::ring(0);
    let until = now_ns() + 1_000 * MS;
    while now_ns() < until {
        let (ended, tid) = (STATE.load(SeqCst) == 3, TID.load(SeqCst));
        // SAFETY: signal 0 asks only whether the thread exists.
        if ended && (tid == 0 || unsafe { sys!(libc::SYS_tgkill, crate::process::pid(), tid, 0) }.is_err()) {
            return;
        }
        // SAFETY: no preconditions.
        let _ = unsafe { sys!(libc::SYS_sched_yield) };
    }
}

/// Starts it, unless there is one, or cannot be.
#[cold]
pub(super) fn start() {
    if STATE.compare_exchange(0, 1, AcqRel, Acquire).is_err() {
        return;
    }
    if !spawn(main, STACK_BYTES) {
        // What the program has chosen is no fault of an operator's.
        let own = limits::has_set_threads();
        failed(if own { Level::Info } else { Level::Warn }, if own { " (RLIMIT_NPROC)" } else { "" });
    } else {
        // What it does first may need a low number for a moment. That is over before the program goes on, if only the
        // thread that is here counts on numbers. (What others hold may keep it up; so not for long.)
        let until = now_ns() + START_NS;
        while STATE.load(Acquire) == 1 && now_ns() < until {
            let _ = futex_wait(&STATE, 1, until - now_ns());
        }
    }
}

fn failed(level: Level, why: &str) {
    log(level, format_args!("cannot start the background thread{why}: connections stay on TCP"));
    STATE.store(3, Release);
    futex_wake(&STATE, i32::MAX);
}

/// Starts a thread; with a stack of 0 bytes: of the usual size.
pub fn spawn(main: extern "C" fn(*mut c_void) -> *mut c_void, stack: usize) -> bool {
    // The program's signals are not for this thread. Two are libc's own (32 and 33): `setuid` and its kin wait until
    // every thread has answered them.
    let all = !(0b11u64 << 31);
    let mut old = 0u64;
    // SAFETY: both masks are 8 bytes, as the kernel wants them.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &all, &mut old, 8) };
    // SAFETY: the attribute object is initialised before it is used; `main` takes no argument.
    let ok = unsafe {
        let mut attr: libc::pthread_attr_t = core::mem::zeroed();
        let mut t: libc::pthread_t = core::mem::zeroed();
        libc::pthread_attr_init(&mut attr);
        if stack > 0 {
            libc::pthread_attr_setstacksize(&mut attr, stack);
        }
        libc::pthread_attr_setdetachstate(&mut attr, libc::PTHREAD_CREATE_DETACHED);
        let r = libc::pthread_create(&mut t, &attr, main, core::ptr::null_mut());
        libc::pthread_attr_destroy(&mut attr);
        r == 0
    };
    // SAFETY: as above.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &old, 0, 8) };
    ok
}

/// Where the library's threads begin.
pub fn entries() -> [usize; 2] {
    [main, clerk].map(|f: extern "C" fn(*mut c_void) -> *mut c_void| f as usize)
}

extern "C" fn main(_: *mut c_void) -> *mut c_void {
    // SAFETY: a NUL-terminated name.
    let _ = unsafe { sys!(libc::SYS_prctl, libc::PR_SET_NAME, c"ringsock".as_ptr()) };
    while LEAVES.load(SeqCst) == 1 {
        let _ = futex_wait(&LEAVES, 1, START_NS);
    }
    TID.store(crate::thread::tid(), SeqCst);
    STARTED.store(true, Relaxed);
    desk::open(|| spawn(clerk, STACK_BYTES));
    if let Some(mut bg) = bell::page_fd().and_then(|_| Bg::new()) {
        STATE.store(2, Release);
        futex_wake(&STATE, i32::MAX);
        let rests = bg.run();
        bg.close_all();
        if rests {
            LEFT.store(Box::into_raw(bg), SeqCst);
        } else {
            STATE.store(3, Release);
        }
    } else {
        failed(Level::Warn, "");
    }
    desk::close();
    LEAVES.store(0, SeqCst);
    futex_wake(&LEAVES, i32::MAX);
    core::ptr::null_mut()
}

extern "C" fn clerk(_: *mut c_void) -> *mut c_void {
    // SAFETY: a NUL-terminated name.
    let _ = unsafe { sys!(libc::SYS_prctl, libc::PR_SET_NAME, c"ringsock".as_ptr()) };
    desk::clerk();
    core::ptr::null_mut()
}

/// For how long something is waited for.
fn patience() -> i64 {
    if chaos::is_on() {
        return 2 * MS;
    }
    REST_AFTER_NS << RESTS.load(Relaxed).min(REST_DOUBLINGS)
}

/// Whether something has come that no timer tells of.
pub(super) fn is_asked() -> bool {
    let flags = END.load(SeqCst) || SEND_BELLS.load(SeqCst) || PROVIDE_BELLS.load(SeqCst) || crowd::is_asked();
    flags || !INBOX.load(SeqCst).is_null()
}

impl Bg {
    fn has_nothing_to_do(&self) -> bool {
        if crate::process::has_threads() {
            return false;
        }
        let at_peers =
            self.looks.is_empty() && self.callers.is_empty() && self.links.is_empty() && self.dead.is_empty();
        let with_them = self.parked.is_empty() && self.unsent.is_empty() && self.ask_later.is_empty();
        let of_conns = self.restless.is_empty() && self.later.is_empty() && self.suspects.is_empty();
        let of_rings = self.corked.is_empty() && self.grown.is_empty() && self.held_links.is_empty();
        // An operator who has switched it off is to be heard when that is over.
        let of_others = self.rests.is_empty() && self.guests.is_empty() && !order::is_off() && !BEARS.load(SeqCst);
        at_peers
            && with_them
            && of_conns
            && of_rings
            && of_others
            && !self.rdma.is_used()
            && !self.census.is_under_way()
    }

    /// When the thread may go, or `i64::MAX`.
    pub(super) fn rest_at(&self) -> i64 {
        match self.idle_since {
            0 => i64::MAX,
            since => since + patience(),
        }
    }

    /// Goes, if it is time: nothing is left of what the thread would have to do.
    pub(super) fn rests(&mut self) -> bool {
        if is_asked() || link::any_hints(0) || !self.has_nothing_to_do() {
            self.idle_since = 0;
            return false;
        }
        let now = now_ns();
        if self.idle_since == 0 {
            self.idle_since = now;
        }
        if now < self.rest_at() {
            return false;
        }
        if arena::any(Phase::Managed) {
            // What has no link any more, but is not closed yet.
            self.idle_since = now;
            return false;
        }
        RESTS.fetch_add(1, SeqCst);
        LEAVES.store(1, SeqCst);
        STATE.store(0, SeqCst);
        full_fence();
        // Who has put something there before that has rung, and starts nobody.
        if (is_asked() || BEARS.load(SeqCst)) && STATE.compare_exchange(0, 2, SeqCst, SeqCst).is_ok() {
            LEAVES.store(0, SeqCst);
            futex_wake(&LEAVES, i32::MAX);
            return false;
        }
        self.idle_since = 0;
        // Nobody who has not been found by now can be, so their ends concern the program alone.
        for k in self.known.drain().map(|(_, k)| k) {
            if k.conn.gen.load(Relaxed) == k.gen {
                k.conn.local().submitted.store(false, SeqCst);
            }
        }
        self.end_of.clear();
        self.asked.clear();
        log(Level::Debug, format_args!("nothing to do: the background thread ends until there is"));
        true
    }
}
