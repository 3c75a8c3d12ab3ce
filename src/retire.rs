//! The end of the library's work in a process that goes on: a program that confines itself to system calls of its own
//! choice (`seccomp(2)`) has not chosen ours, and may be killed for one.
//!
//! Before the filter is installed every connection returns to TCP for good, the background thread ends, the report is
//! written, and all fds and epoll sets are forgotten: from then on every call goes straight to libc's function. A filter
//! that stood before the program began, as in a container, is another matter: what it refuses leaves connections on TCP.
//!
//! So it is with a program of one thread that goes to namespaces of which the kernel wants to know that there is no other
//! (`unshare(2)`, `setns(2)`), and with one of several threads of which one is to have a table of its own for its fds.

use crate::log::{log, Level};
use crate::sync::pause;
use crate::sys::sys;
use crate::table::{self, Entry};
use crate::{bg, copy, holders, process};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use libc::c_int;

/// `BPF_MAXINSNS` of linux/bpf_common.h.
const MOST_INSTRUCTIONS: u16 = 4096;

static RETIRED: AtomicBool = AtomicBool::new(false);
/// It is about to. What another thread forks meanwhile is a child like any other.
static RETIRING: AtomicBool = AtomicBool::new(false);

/// Whether the library has retired in this process, or in one that it descends from.
pub fn is_retired() -> bool {
    RETIRED.load(Relaxed)
}

/// Whether the program runs under a filter, which had been there before it: that may kill for a call that it does not know.
pub fn is_filtered() -> bool {
    /// 0: not known yet, 1: there is none, 2: there is one.
    static FILTERED: AtomicU32 = AtomicU32::new(0);
    if FILTERED.load(Relaxed) == 0 {
        // SAFETY: a question.
        let mode = unsafe { sys!(libc::SYS_prctl, libc::PR_GET_SECCOMP, 0, 0, 0, 0) };
        FILTERED.store(if mode == Ok(0) { 1 } else { 2 }, Relaxed);
    }
    FILTERED.load(Relaxed) == 2
}

/// In a child that was forked while another thread of the parent was about to retire.
pub fn reset_after_fork() {
    RETIRING.store(false, Relaxed);
}

/// Whether `seccomp(operation, flags, args)` installs a filter: strict mode, or the program's own. The rest are questions, also
/// what the kernel must refuse: libseccomp asks with no filter at all whether there could be one, in every QEMU.
///
/// # Safety
/// As for the call.
pub unsafe fn confines(operation: u32, flags: usize, args: usize) -> bool {
    match operation {
        libc::SECCOMP_SET_MODE_STRICT => flags == 0 && args == 0,
        // SAFETY: any bits are valid, and there may be nothing.
        libc::SECCOMP_SET_MODE_FILTER => unsafe { copy::read(args as *const libc::sock_fprog) }
            .is_ok_and(|p| (1..=MOST_INSTRUCTIONS).contains(&p.len)),
        _ => false,
    }
}

/// The same of `prctl(option, mode, args)`.
///
/// # Safety
/// As for the call.
pub unsafe fn confines_by_prctl(option: c_int, mode: usize, args: usize) -> bool {
    option == libc::PR_SET_SECCOMP
        && match mode as u32 {
            libc::SECCOMP_MODE_STRICT => true,
            // SAFETY: the caller's promise.
            libc::SECCOMP_MODE_FILTER => unsafe { confines(libc::SECCOMP_SET_MODE_FILTER, 0, args) },
            _ => false,
        }
}

/// Before the program installs a filter. Blocks until all connections are back on TCP.
pub fn retire() {
    retire_for("confines itself by seccomp");
}

/// The kernel has refused what the program may do only if it has no other thread. If the library's is the only one it ends: it is
/// worth asking again.
pub fn leave_alone() -> bool {
    if !process::is_active() || process::is_guest() || !bg::is_only_other() {
        return false;
    }
    retire_for("is to have one thread only");
    true
}

/// A thread is about to have a table of its own for its fds. What the library knows of numbers is the process's, and its own
/// threads are to have the table of the program's: so it retires. False: the program has one thread, which can tell by
/// nothing whether it has a table of its own, and keeps this one.
pub fn gives_own_table() -> bool {
    const PAUSE_NS: i64 = 1_000_000;
    const MOST: u32 = 10_000;
    if !process::is_active() || process::is_guest() {
        return true;
    }
    if !process::has_threads() {
        return false;
    }
    retire_for("gives a thread fds of its own");
    // Another thread may be at it. (Not for ever: this may be a handler that has interrupted that.)
    (0..MOST).take_while(|_| RETIRING.load(SeqCst) && !is_retired()).for_each(|_| pause(PAUSE_NS));
    true
}

fn retire_for(what: &str) {
    if !process::is_active() || process::is_guest() || RETIRING.swap(true, SeqCst) {
        return;
    }
    process::no_more_rings();
    log(Level::Info, format_args!("the program {what}: all its connections stay on TCP"));
    bg::end();
    // Forks from here on go unseen: whoever else holds a connection is not to take itself for the only one.
    process::each_held(|c| {
        if !c.holders.is_only(process::holder_id()) {
            c.holders.add(holders::UNKNOWN);
        }
    });
    process::write_report();
    crate::fault::stand_down();
    process::rest();
    RETIRED.store(true, SeqCst);
    for fd in 0..=table::highest() {
        if let Entry::Set(s) = table::take(fd) {
            s.retire();
        }
    }
}
