//! Files of libraries that open them by themselves, at the clerk's: what they keep has one number in both tables.
//!
//! libibverbs and librdmacm are called by the background thread to make queue pairs and the like, and by threads of the
//! program to send by them, in both cases with the fds that they have. So each of these is put under a number of the
//! program's table that was reserved before the call, and under the same one in the clerk's.

use super::*;
use crate::provider::Release;

/// How many fds one call may keep: a device has two, and its channel is another.
const MOST: usize = 4;
/// Numbers of the program's table that are reserved; -1: none.
static SPARE: [AtomicI32; MOST] = [const { AtomicI32::new(-1) }; MOST];
/// What the clerk has given up in a call, for the program's table: number, and how. More than devices can be removed at once.
static LEFT: [AtomicI32; 64] = [const { AtomicI32::new(-1) }; 64];
const HOW_SHIFT: u32 = 24;

/// As [`run`], for a library's call that may keep fds ([`keep`]) or give them up ([`give_up`]). What it calls is interposed; it
/// is not to find the program's connections under its numbers.
pub fn host<R>(f: impl FnOnce() -> R) -> R {
    if !is_open() {
        return f();
    }
    for spare in SPARE.iter().filter(|s| s.load(Relaxed) < 0) {
        // Where there is none to be had, `keep` fails.
        let made = fdhigh::not_for_children(|| fdhigh::dup_out_of_the_way(HOLD.load(Relaxed)));
        spare.store(made.unwrap_or(-1), Relaxed);
    }
    let r = run(|| {
        thread::me(|me| me.outside.set(if is_here() { thread::OUTSIDE } else { 0 }));
        let r = f();
        thread::me(|me| me.outside.set(0));
        r
    });
    for left in &LEFT {
        let word = left.swap(-1, Relaxed);
        let fd = word & ((1 << HOW_SHIFT) - 1);
        if word < 0 {
            break;
        }
        if word >> HOW_SHIFT == Release::Replaced as i32 {
            // Another thread of the program may still have it in a call.
            // SAFETY: our own number; what is put there is any file.
            let _ = unsafe { sys!(libc::SYS_dup3, HOLD.load(Relaxed), fd, libc::O_CLOEXEC) };
        } else {
            sys::close(fd);
        }
    }
    r
}

/// The number for a new fd of a library's that is to be kept, under which it is in both tables; -1: there is none, and it is
/// still what it was. Without a clerk it is in one table, where it gets a high number.
pub fn keep(fd: c_int) -> c_int {
    if !is_here() {
        return fdhigh::not_for_children(|| Ok(fdhigh::move_high(fd))).unwrap_or(-1);
    }
    let Some((spare, to)) = SPARE.iter().map(|s| (s, s.load(Relaxed))).find(|(_, to)| *to >= 0) else { return -1 };
    // SAFETY: a number that nothing else has here, as nothing else has it in the program's table.
    if unsafe { sys!(libc::SYS_dup3, fd, to, libc::O_CLOEXEC) }.is_err() {
        return -1;
    }
    if add(to, to).is_err() {
        sys::close_raw(to);
        return -1;
    }
    spare.store(-1, Relaxed);
    sys::close_raw(fd);
    to
}

/// A library's fd that [`keep`] has placed is given up.
pub fn give_up(fd: c_int, how: Release) {
    if !is_here() {
        if how != Release::Gone {
            fdhigh::forget(fd);
        }
        return;
    }
    // Any other number is somebody else's in the program's table.
    if !fdhigh::is_ours(fd) {
        return;
    }
    if let Some(left) = LEFT.iter().find(|l| l.load(Relaxed) < 0) {
        left.store(fd | (how as i32) << HOW_SHIFT, Relaxed);
    }
}

/// In a forked child: what was reserved is closed there.
pub(super) fn reset_after_fork() {
    for word in SPARE.iter().chain(&LEFT) {
        word.store(-1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::ONE;
    use super::*;
    use crate::table;
    use std::sync::mpsc;
    use std::time::Duration;

    fn eventfd() -> c_int {
        // SAFETY: no preconditions.
        unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }.expect("an eventfd") as c_int
    }

    fn put(fd: c_int) -> bool {
        // SAFETY: eight readable bytes.
        let done = unsafe { sys!(libc::SYS_write, fd, &1u64, 8) };
        done == Ok(8)
    }

    fn take(fd: c_int) -> bool {
        // SAFETY: eight writable bytes.
        let done = unsafe { sys!(libc::SYS_read, fd, &mut 0u64, 8) };
        done == Ok(8)
    }

    /// What a thread that has a clerk finds, or nothing where there can be none.
    fn found() -> Option<[bool; 10]> {
        fn spawn() -> bool {
            std::thread::spawn(clerk);
            true
        }
        open(spawn);
        if !is_open() {
            return None;
        }
        let kept: Vec<c_int> = (0..MOST as c_int + 1).map(|_| host(|| keep(eventfd()))).collect();
        let high = kept.iter().all(|fd| fdhigh::is_ours(*fd));
        let shared = kept.iter().all(|fd| put(*fd) && run(|| take(*fd)) && run(|| put(*fd)) && take(*fd));
        let many = host(|| [(); MOST + 1].map(|()| keep(eventfd())));
        let enough = many[..MOST].iter().all(|fd| *fd >= 0) && many[MOST] == -1;
        host(|| {
            give_up(kept[0], Release::Closed);
            sys::close_raw(kept[0]);
            sys::close_raw(kept[1]);
            give_up(kept[1], Release::Gone);
            give_up(kept[2], Release::Replaced);
        });
        let closed = !put(kept[0]) && !put(kept[1]) && !fdhigh::is_ours(kept[0]);
        // Somebody else's file is under it, and the clerk's is still the old one.
        let replaced = put(kept[2]) && run(|| !take(kept[2])) && fdhigh::is_ours(kept[2]);
        // What was never kept is the clerk's alone, and something of the program's may have its number.
        let programs = eventfd();
        host(|| [Release::Closed, Release::Replaced, Release::Gone].map(|how| give_up(programs, how)));
        let untouched = put(programs) && take(programs);
        let others = kept[3..].iter().all(|fd| put(*fd) && run(|| take(*fd)));
        table::for_tests();
        let number = kept[3];
        table::put_tcp(number);
        let hidden = host(|| !table::is_tcp(number)) && run(|| table::is_tcp(number)) && table::is_tcp(number);
        table::take(number);
        let again = host(|| keep(eventfd()));
        let reserved = again >= 0 && kept[2..].iter().all(|fd| *fd != again);
        close();
        let outlive = put(kept[3]) && take(kept[3]);
        Some([high, shared, enough, closed, replaced, others, reserved, outlive, hidden, untouched])
    }

    #[test]
    fn what_a_library_keeps_has_one_number_in_both_tables() {
        let _one = ONE.lock();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || tell.send(found()));
        let found = told.recv_timeout(Duration::from_secs(10)).expect("nobody waits for ever");
        assert!(found.is_none_or(|found| found == [true; 10]), "{found:?}");
    }
}
