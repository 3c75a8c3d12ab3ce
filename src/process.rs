//! What concerns the process as a whole: its start and end, fork, exec.

use crate::conn::*;
use crate::layout::{ABORT, BYE, CLOSED, LEAVING};
use crate::stats::Why;
use crate::sync::now_ns;
use crate::sys::{self, sys};
use crate::{
    arena, bell, bg, config, desk, early, epoll, fdhigh, forking, holders, limits, link, provider, pump, remains,
    report, shm, table, visit,
};
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::*};

mod leave;
use leave::{await_home, await_parents, give_lowat, hand_over, leave, leave_to_kernel, reset_abroad, PATIENCE_NS};
pub use leave::{
    await_let_go, give_up, give_up_all, no_more_rings, reset_doomed, rings_allowed, stay_for_others, try_give_up,
};

static PID: AtomicU32 = AtomicU32::new(0);
/// Tells this process from all others of its family, those with the same id too.
static LIFE: AtomicU32 = AtomicU32::new(1);
/// Other processes of the family cannot be told by their ids: they may live in another pid namespace.
static APART: AtomicBool = AtomicBool::new(false);
static READY: AtomicBool = AtomicBool::new(false);
static ENDED: AtomicBool = AtomicBool::new(false);
static EXECUTING: AtomicBool = AtomicBool::new(false);

/// This process's id, cached; right in forked children (whose handlers have run).
#[inline]
pub fn pid() -> u32 {
    PID.load(Relaxed)
}

/// [`pid`] is known, as in a process that has the library.
#[cfg(test)]
pub fn for_tests() -> u32 {
    PID.store(sys::pid(), Relaxed);
    pid()
}

/// What tells this process from all others of its family, even from one that had its id before it.
#[inline]
pub fn life() -> u32 {
    LIFE.load(Relaxed)
}

fn new_life() {
    let mut b = [0; 4];
    random(&mut b);
    LIFE.store(u32::from_ne_bytes(b) | 1, Relaxed);
}

/// How this process stands in lists of holders.
pub fn holder_id() -> u32 {
    if APART.load(Relaxed) {
        holders::UNKNOWN
    } else {
        pid()
    }
}

/// Whether other processes of the family have ids that mean nothing here.
pub fn is_apart() -> bool {
    APART.load(Relaxed)
}

/// Another process may be in this process's memory, or have been: `vfork` or `clone` was called. Set by their hooks, in
/// assembly.
pub static GUESTS: AtomicBool = AtomicBool::new(false);

/// A word that the kernel makes 0 in every copy of this process's memory; null: it does not do that (before 4.14).
static HOME: AtomicPtr<AtomicBool> = AtomicPtr::new(core::ptr::null_mut());

/// Whether the caller's numbers are not this process's: a `vfork` child, another process in this process's memory, a copy
/// that nobody told us of, or the clerk, which may call what is interposed (`opendir`, within std).
#[inline]
pub fn is_guest() -> bool {
    crate::desk::is_here() || is_active() && !is_surely_home() && sys::pid() != pid()
}

/// Whether the kernel need not be asked which process this is.
#[inline]
fn is_surely_home() -> bool {
    // SAFETY: null, or set once to a page that is never unmapped.
    let home = unsafe { HOME.load(Relaxed).as_ref() };
    !GUESTS.load(Relaxed) && home.is_some_and(|h| h.load(Relaxed))
}

fn make_home() {
    const PAGE: usize = 4096;
    let Ok(m) = shm::anon_private(PAGE) else { return };
    // SAFETY: a mapping of our own, page-aligned, as long as the kernel's pages are no longer.
    if unsafe { sys!(libc::SYS_madvise, m.base, PAGE, libc::MADV_WIPEONFORK) }.is_ok() {
        HOME.store(m.base.cast(), Relaxed);
        come_home();
    }
}

fn come_home() {
    // SAFETY: as in `is_surely_home`.
    if let Some(h) = unsafe { HOME.load(Relaxed).as_ref() } {
        h.store(true, Relaxed);
    }
}

/// A thread of the program has gone to another network namespace since the library looks for peers.
static LEFT_NETWORK: AtomicBool = AtomicBool::new(false);

/// A thread of the program is in another network namespace now.
pub fn left_network() {
    // (A background thread that begins later is where the thread is that begins it.)
    if has_threads() || bg::is_there() {
        LEFT_NETWORK.store(true, SeqCst);
    }
}

/// Whether a socket may be of another network namespace than the background thread, where the kernel does not tell.
pub fn has_left_network() -> bool {
    LEFT_NETWORK.load(SeqCst)
}

/// Whether the library is at work in this process.
#[inline]
pub fn is_active() -> bool {
    READY.load(Relaxed)
}

/// The library works no more in this process.
pub fn rest() {
    READY.store(false, SeqCst);
}

/// Whether the process is about to end: what is begun now will not be finished.
pub fn is_ending() -> bool {
    ENDED.load(SeqCst)
}

/// Whether the process is about to become another image, which knows nothing of an upgrade that begins now.
pub fn is_executing() -> bool {
    EXECUTING.load(SeqCst)
}

/// Random bytes.
pub fn random(buf: &mut [u8]) {
    // SAFETY: `buf` is writable.
    if unsafe { sys!(libc::SYS_getrandom, buf.as_mut_ptr(), buf.len(), 0) } != Ok(buf.len()) {
        // Only very early in a machine's life.
        for (i, b) in buf.iter_mut().enumerate() {
            *b = (now_ns() >> (i % 8)) as u8 ^ pid() as u8;
        }
    }
}

/// The program's name (comm), NUL-padded. That is the main thread's: others have names of their own, as those of a JVM and ours.
pub fn program_name(to: &mut [u8; 64]) {
    if crate::thread::tid() != pid() {
        if let Ok(file) = crate::textfile::TextFile::read(b"/proc/self/comm\0", 64) {
            let name = file.bytes().trim_ascii_end();
            if let (Some(to), false) = (to.get_mut(..name.len()), name.is_empty()) {
                to.copy_from_slice(name);
                return;
            }
        }
    }
    // SAFETY: PR_GET_NAME writes at most 16 bytes.
    let _ = unsafe { sys!(libc::SYS_prctl, libc::PR_GET_NAME, to.as_mut_ptr()) };
}

/// The library is loaded.
pub fn init() {
    PID.store(sys::pid(), Relaxed);
    new_life();
    let c = config::get();
    if (c.links.shm || c.links.verbs || c.report.is_some()) && crate::rules::program_allowed() {
        table::init();
        make_home();
        crate::sleepers::init();
        bg::last::init();
        limits::init();
        READY.store(true, Release);
        if c.links.shm || c.links.verbs {
            crate::foreign::init();
        }
    }
}

/// The process ends: writes the report.
pub fn exiting() {
    if is_guest() || !is_active() || ENDED.swap(true, AcqRel) {
        return;
    }
    bring_shared_home(now_ns() + 2_000_000_000, |_| true);
    bg::guests::await_answers(now_ns() + ANSWERED_NS);
    finish_returns(now_ns() + 2_000_000_000, |_| true);
    say_goodbye();
    remains::await_all(now_ns() + 2_000_000_000);
    each_held(|c| read_kernel_counts(c, c.local().fd.load(Relaxed)));
    write_report();
    // The kernel closes what is open; others who hold the same connections are to know.
    each_held(|c| c.holders.remove(holder_id()));
}

/// How long those are waited for who are to hear that what they asked for is home.
const ANSWERED_NS: i64 = 100_000_000;

/// Connections that other processes hold as well, and that only this one could serve, return to TCP.
fn bring_shared_home(until: i64, which: impl Fn(&Conn) -> bool) {
    let mine = |c: &Conn| c.phase() == Phase::Managed && !c.is_inherited() && which(c);
    let mut any = false;
    each_held(|c| {
        if mine(c) && !c.holders.is_only(holder_id()) {
            leave(c, Why::Shared);
            any = true;
        }
    });
    if any {
        each_held(|c| {
            if mine(c) && !c.holders.is_only(holder_id()) {
                await_home(c, until);
                hand_over(c, until);
            }
        });
    }
}

/// Writes the report, if one is wanted.
pub fn write_report() {
    // The background thread may be closing hundreds of connections right now.
    let _books = arena::stop_books();
    if let Some((header, conns)) = arena::view() {
        report::at_exit(header, conns);
    }
}

/// A return that is under way is finished: what `send` accepted must reach the peer, though the kernel is about to close
/// the sockets of this process.
fn finish_returns(until: i64, which: impl Fn(&Conn) -> bool) {
    arena::each(|c| {
        while c.phase() == Phase::Managed && which(c) && now_ns() < until {
            let busy = {
                let mut b = c.lock_both();
                if let Some(own) = c.own().filter(|_| c.holders.is_only(holder_id())) {
                    let fresh = own.flags.fetch_or(BYE, SeqCst) & BYE == 0;
                    c.flush();
                    if fresh && c.peer().is_some_and(|p| p.flags.load(SeqCst) & LEAVING != 0) {
                        // What it has announced, and not begun, it takes back now.
                        c.hint_peer();
                    }
                }
                pump::run(&mut b);
                // A mark or frame that nobody takes makes the kernel reset what should only end.
                let about_to = c.connector.load(Relaxed) && c.peer().is_none() && !c.has_ended(END_EOF);
                c.lingers() && !visit::is_home(&mut b)
                    || about_to && b.rx.path() == crate::switch::RxPath::Armed
                    || b.is_owed()
            };
            if !busy {
                break;
            }
            let _ = crate::poll::wait_one(c.local().fd.load(Relaxed), libc::POLLOUT | libc::POLLIN, 1_000_000);
        }
    });
}

/// What was accepted for a ring on another host must arrive there, and that it is all, before the queue pair
/// goes with this process.
fn say_goodbye() {
    let mut any = false;
    arena::each(|c| {
        if c.phase() != Phase::Managed || !c.holders.is_only(holder_id()) || c.remote().is_none() {
            return;
        }
        crate::io::release(c);
        let unread = c.try_lock_both().is_some_and(|mut b| crate::fds::unread(&mut b));
        if let Some(own) = c.own() {
            own.flags.fetch_or(CLOSED | if unread || c.linger0.load(Relaxed) { ABORT } else { 0 }, SeqCst);
        }
        c.flush();
        any = true;
    });
    let until = now_ns() + 2_000_000_000;
    let mut left = any;
    while left && now_ns() < until {
        link::each_remote(|r| r.poll(false));
        left = false;
        arena::each(|c| {
            let r = c.remote().filter(|r| c.phase() == Phase::Managed && !r.failed.load(SeqCst));
            left |= r.is_some_and(|r| c.holders.is_only(holder_id()) && !r.has_delivered(c.slot.load(Relaxed)));
        });
        // SAFETY: no preconditions.
        let _ = unsafe { sys!(libc::SYS_sched_yield) };
    }
    link::each_remote(|r| r.log_counts());
}

/// Asks the kernel how much went through a connection that is not counted call by call. `fd`: one of its numbers.
pub fn read_kernel_counts(c: &Conn, fd: i32) {
    if c.phase() != Phase::Plain {
        return;
    }
    if let Ok((tx, rx)) = crate::rendezvous::kernel_counts(fd, c.connector.load(Relaxed)) {
        // What it had counted when we stopped to is in the record: that may include marks and repeated bytes, which
        // are not the program's, and what another process has moved and counted.
        let s = c.stats();
        let (before, after) = ((c.tx_tcp(), c.rx_tcp()), (tx, rx));
        s.tx_bytes_tcp.fetch_add(after.0.saturating_sub(before.0), Relaxed);
        s.rx_bytes_tcp.fetch_add(after.1.saturating_sub(before.1), Relaxed);
        c.set_tcp_counts(after);
    }
}

thread_local! {
    /// What the child of the fork that this thread is about to make is called until it has an id.
    static TOKEN: Cell<u32> = const { Cell::new(0) };
}
static FORKS: AtomicU32 = AtomicU32::new(0);

/// A name for the child that this thread is about to make, unique among those that a family has under way.
fn new_token() -> u32 {
    let token = (pid() << 8 | (FORKS.fetch_add(1, Relaxed) & 0xff)) & 0x3fff_ffff;
    TOKEN.with(|t| t.set(token));
    token
}

/// Before fork: the connections get another holder.
pub fn fork_prepare() {
    if !is_active() {
        return;
    }
    bg::bear();
    let token = new_token();
    let mut any = false;
    let sets = epoll::about_to_fork();
    // Nothing goes on as another record from here on: what expects the child is what it will have.
    each_held(|c| {
        c.holders.expect(token);
        any |= !c.is_inherited();
    });
    early::about_to_fork();
    if sets || any {
        visit::offer_bell();
    }
}

/// After fork, in the parent, before anybody knows its result.
pub fn fork_is_over() {
    forking::is_over();
}

/// After fork, in the parent, where its result is known: the child's id, or less than 0 if there is none.
pub fn forked(child: i32) {
    let token = TOKEN.with(|t| t.replace(0));
    if !is_active() || token == 0 {
        return;
    }
    let who = match APART.load(Relaxed) {
        _ if child < 0 => 0,
        true => holders::UNKNOWN,
        false => child as u32,
    };
    each_held(|c| c.holders.born(token, who));
}

/// Whether the program has ever had more than one thread.
static THREADS: AtomicBool = AtomicBool::new(false);

/// The program is about to have another thread.
pub fn another_thread() {
    THREADS.store(true, Relaxed);
}

/// Whether a thread of the program that waits may keep others waiting for it.
#[inline]
pub fn has_threads() -> bool {
    THREADS.load(Relaxed)
}

/// In the child.
pub fn fork_child() {
    if crate::retire::is_retired() {
        return;
    }
    crate::retire::reset_after_fork();
    THREADS.store(false, Relaxed);
    let parents_life = life();
    PID.store(sys::pid(), Relaxed);
    come_home();
    new_life();
    // SAFETY: no preconditions.
    if unsafe { sys!(libc::SYS_getppid) } == Ok(0) {
        // The parent is in another pid namespace.
        APART.store(true, Relaxed);
    }
    crate::thread::forget_tid();
    crate::chaos::reset_after_fork();
    ENDED.store(false, Relaxed);
    EXECUTING.store(false, Relaxed);
    if !is_active() {
        return;
    }
    crate::sleepers::init();
    crate::signals::reset_after_fork();
    desk::reset_after_fork();
    forking::reset_after_fork();
    fdhigh::close_singles();
    visit::reset_after_fork(parents_life);
    bg::reset_after_fork();
    provider::reset_after_fork();
    link::reset_after_fork();
    epoll::reset_after_fork();
    early::reset_after_fork();
    bell::reset_after_fork();
    remains::reset_after_fork();
    bg::guests::reset_after_fork();
    arena::reset_after_fork();
    let token = TOKEN.with(|t| t.replace(0));
    each_held(|c| {
        c.holders.born(token, holder_id());
        let l = c.local();
        l.lock.reset_after_fork();
        l.begin_anew();
        c.note_kept();
        l.watchers.store(0, Relaxed);
        l.managed.store(false, Relaxed);
        // The lists are the parent's; their memory is left alone, for a lock of the allocator's own may be
        // in any state here.
        // SAFETY: this is the child's only thread.
        unsafe {
            // In sets of which only the kernel knows here, until they are used.
            l.blind.fetch_add((*l.items.get()).len() as u32 + l.young.forget() as u32, Relaxed);
            core::ptr::write(l.items.get(), Vec::new());
            core::ptr::write(l.waiters.get(), Vec::new());
        }
    });
}

/// Calls `f` for each connection that this process has an fd of.
pub fn each_held(mut f: impl FnMut(&'static Conn)) {
    for fd in 0..=table::highest() {
        if let Some(c) = table::conn(fd) {
            // Once for each connection, not for each of its numbers.
            if c.local().fd.load(Relaxed) == fd {
                f(c);
            }
        }
    }
}

/// Before exec: connections that survive it, and are not close-on-exec, come back to TCP.
pub fn exec_prepare() {
    if !is_active() || is_guest() {
        return;
    }
    // What a new image gets as its standard input or output it is going to use. The rest it asks for, if
    // it is preloaded (`foreign`).
    give_up_all(crate::streams::STANDARD.filter_map(table::conn), Why::Forked);
    let late = now_ns() + PATIENCE_NS;
    crate::streams::STANDARD.filter_map(table::conn).for_each(|c| await_parents(c, late));
    // No upgrade begins from here on; one that is just beginning has its connection's locks.
    let first = !EXECUTING.swap(true, SeqCst);
    each_held(|c| {
        if !c.is_inherited() {
            drop(c.lock_both());
        }
    });
    let began = now_ns();
    let until = began + 1_000_000_000;
    let mine = |c: &Conn| c.phase() == Phase::Managed && !c.is_inherited();
    let mut any = false;
    each_held(|c| {
        // A forked child that merely inherited it leaves the parent's ring alone.
        if mine(c) && (!close_on_exec(c) || c.remote().is_some()) {
            leave(c, Why::Forked);
            any = true;
        }
    });
    if any {
        each_held(|c| {
            let closes = close_on_exec(c);
            if mine(c) && (!closes || c.remote().is_some()) {
                // What the new image sends must not stand where bytes of this one are missing.
                let until = if closes { until } else { began + PATIENCE_NS };
                await_home(c, until);
                visit::await_rest(c, until);
                if !closes {
                    hand_over(c, until);
                    reset_abroad(c);
                    give_lowat(c);
                }
            }
        });
    }
    bring_shared_home(until, close_on_exec);
    bg::guests::await_answers(now_ns() + ANSWERED_NS);
    // What the program has closed is kept by an fd of the library's, which exec closes, too.
    finish_returns(until, |c| !c.is_inherited() && (c.lingers() || close_on_exec(c)));
    remains::await_all(until);
    // Those that exec closes have a holder less.
    if first {
        each_held(|c| {
            if close_on_exec(c) {
                c.holders.remove(holder_id());
            }
        });
    }
    // The report of this image; if exec fails, the process writes another one when it ends.
    each_held(|c| read_kernel_counts(c, c.local().fd.load(Relaxed)));
    write_report();
}

/// Before a child is spawned with the file actions at `acts` or none (0): it has what it inherits, whatever we close meanwhile;
/// and unless it `asks` for what it uses, because it is preloaded, that comes home. Says whether there is anything.
pub fn spawn_prepare(acts: usize, asks: bool) -> bool {
    if is_guest() || table::highest() < 0 {
        return false;
    }
    let began = now_ns();
    let mut any = false;
    let token = new_token();
    each_held(|c| {
        let given = crate::foreign::is_given_by(acts, c);
        let passes = !close_on_exec(c) || given || crate::foreign::is_given(c);
        // What it gets by a file action it is going to use, and what it sends must not stand where bytes are missing. The rest
        // it may have only because nobody has closed it.
        let until = began + if given { PATIENCE_NS } else { 1_000_000_000 };
        if matches!(c.phase(), Phase::Raw | Phase::Managed | Phase::Away) && passes {
            any = true;
            if asks {
                let _b = c.lock_both();
                c.holders.expect(token);
                return;
            }
            if c.is_inherited() {
                visit::settle(c);
            }
            let managed = {
                // An upgrade that is just beginning has either begun, or sees this.
                let _b = c.lock_both();
                c.holders.expect(token);
                c.visited.store(true, SeqCst);
                c.phase() == Phase::Managed
            };
            if managed {
                leave(c, Why::Shared);
                await_home(c, until);
                visit::await_rest(c, until);
                leave_to_kernel(c);
                hand_over(c, until);
                if given {
                    reset_abroad(c);
                }
            } else if given {
                await_parents(c, until);
            }
        }
    });
    any
}

/// The child holds what it has inherited; 0: there is none.
pub fn spawned(child: i32) {
    let token = TOKEN.with(|t| t.replace(0));
    each_held(|c| c.holders.spawned(token, child as u32));
}

/// exec has failed, and the process goes on.
pub fn exec_failed() {
    if is_active() && !is_guest() && EXECUTING.swap(false, SeqCst) {
        each_held(|c| {
            if close_on_exec(c) {
                c.holders.add(holder_id());
            }
            if c.phase() == Phase::Raw {
                // That was for the image.
                crate::foreign::take_down_sign(c);
            }
        });
        arena::each(|c| {
            if c.phase() != Phase::Managed || c.is_inherited() {
                return;
            }
            let _b = c.lock_both();
            if c.own().is_some_and(|own| own.flags.fetch_and(!BYE, SeqCst) & BYE != 0) {
                // A return that either end has put off may begin.
                c.flush();
                c.hint_peer();
                c.ask(ask::PUMP);
            }
        });
    }
}

/// Whether all its numbers are.
fn close_on_exec(c: &Conn) -> bool {
    // SAFETY: a query.
    let is =
        |fd: i32| unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) }.unwrap_or(1) & libc::FD_CLOEXEC as usize != 0;
    if c.local().fds.load(Relaxed) <= 1 {
        return is(c.local().fd.load(Relaxed));
    }
    (0..=table::highest()).all(|fd| !table::is(fd, c) || is(fd))
}

/// Before a message with control data is sent: connections among the fds in it come back to TCP, because
/// the receiver of an fd may be anybody.
///
/// # Safety
/// `msg` must be valid.
pub unsafe fn passing_fds(msg: *const libc::msghdr) {
    if !is_active() || is_guest() {
        return;
    }
    // SAFETY: the caller's promise.
    let (control, len) = unsafe { ((*msg).msg_control, (*msg).msg_controllen) };
    if !sys::is_readable(control, len) {
        return;
    }
    let share = |fd| {
        let hand_on = |c| {
            crate::foreign::hand_on(c);
            give_up(c, Why::Shared);
        };
        table::each_record(fd, hand_on).unwrap_or_else(|| early::shared(fd));
    };
    // SAFETY: it was just looked for.
    unsafe { fds_in(control, len, share) };
}

/// The fds in a message's control data. What stands behind an entry that is too short, or too long, the kernel does not take.
///
/// # Safety
/// `control` is null, or can be read so far.
pub unsafe fn fds_in(control: *const libc::c_void, len: usize, mut each: impl FnMut(i32)) {
    const HEAD: usize = size_of::<libc::cmsghdr>();
    let mut at = 0;
    while !control.is_null() && at + HEAD <= len {
        let entry = control.wrapping_byte_add(at);
        // SAFETY: the caller's promise.
        let c = unsafe { entry.cast::<libc::cmsghdr>().read_unaligned() };
        let size = c.cmsg_len;
        if size < HEAD || size > len - at {
            return;
        }
        if c.cmsg_level == libc::SOL_SOCKET && c.cmsg_type == libc::SCM_RIGHTS {
            let fds = entry.wrapping_byte_add(HEAD).cast::<i32>();
            for i in 0..(size - HEAD) / size_of::<i32>() {
                // SAFETY: as above.
                each(unsafe { fds.add(i).read_unaligned() });
            }
        }
        at += size.next_multiple_of(size_of::<usize>());
    }
}

/// Whether an fd is the library's own.
pub fn is_own_fd(fd: i32) -> bool {
    is_active() && fdhigh::is_ours(fd)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_program_has_the_name_of_its_main_thread() {
        let of_main = std::fs::read(format!("/proc/self/task/{}/comm", super::for_tests())).unwrap();
        let other = std::thread::Builder::new().name("of-its-own".into()).spawn(|| {
            let mut name = [0; 64];
            super::program_name(&mut name);
            name
        });
        let name = other.unwrap().join().unwrap();
        let (text, rest) = name.split_at(of_main.len() - 1);
        assert_eq!(text, of_main.trim_ascii_end());
        assert!(rest.iter().all(|&b| b == 0));
    }
}
