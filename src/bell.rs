//! Bells: how a process that sleeps in the kernel is woken by a peer.
//!
//! A bell is an eventfd and a word in a page that every peer maps. The word
//! is odd while somebody sleeps at the bell, and has a new value for each
//! sleep, so that a peer rings once for one sleep. Bell 0 belongs to the
//! background thread; an epoll set with ring sockets has one of its own, and
//! a thread in `poll` borrows one.

use crate::desk;
use crate::layout::{BellPage, BELLS};
use crate::shm;
use crate::sleepers;
use crate::sync::{full_fence, Lock};
use crate::sys::{self, sys};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use libc::c_int;

static PAGE: AtomicPtr<BellPage> = AtomicPtr::new(core::ptr::null_mut());
static PAGE_FD: AtomicI32 = AtomicI32::new(-1);
static FDS: [AtomicI32; BELLS] = [const { AtomicI32::new(-1) }; BELLS];
static SLEEPERS: [AtomicU32; BELLS] = [const { AtomicU32::new(0) }; BELLS];
/// Of an epoll set's bell: the place at which threads may sleep that do not know of the bell, 0: nobody does.
static UNAWARE: [AtomicUsize; BELLS] = [const { AtomicUsize::new(0) }; BELLS];
static USED: AtomicU64 = AtomicU64::new(0);
static LOCK: Lock = Lock::new();
/// So many bells are kept ready.
const SPARE: u32 = 2;

/// The fd of the page of sleep words, creating page and bell 0 first if need be.
pub fn page_fd() -> Option<c_int> {
    let _g = LOCK.lock();
    if PAGE.load(Acquire).is_null() {
        let (fd, map) = desk::run(|| {
            let (fd, map) = shm::create_owned(b"ringsock-bells\0", 4096).ok()?;
            if shm::allocate(fd, 0, 4096).is_err() {
                sys::close(fd);
                return None;
            }
            Some((fd, map))
        })?;
        PAGE_FD.store(desk::place(fd).ok()?, Relaxed);
        PAGE.store(map.base as *mut BellPage, Release);
        take(0)?;
    }
    Some(PAGE_FD.load(Relaxed))
}

fn take(k: usize) -> Option<u32> {
    if FDS[k].load(Relaxed) < 0 {
        make(k)?;
    }
    USED.fetch_or(1 << k, Relaxed);
    Some(k as u32)
}

fn make(k: usize) -> Option<()> {
    // SAFETY: no preconditions.
    let fd = desk::make(|| unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).ok()?;
    FDS[k].store(fd, Release);
    Some(())
}

/// The bells that exist and that nobody uses, as a set of bits.
fn spare() -> u64 {
    let used = USED.load(Relaxed);
    (0..BELLS).filter(|k| used & 1 << k == 0 && FDS[*k].load(Relaxed) >= 0).fold(0, |set, k| set | 1 << k)
}

/// Makes bells for threads that will want one: by the background thread, whose new fds never have low numbers.
pub fn provide() {
    let _g = LOCK.lock();
    while spare().count_ones() < SPARE {
        let used = USED.load(Relaxed);
        let missing = |k: &usize| used & 1 << k == 0 && FDS[*k].load(Relaxed) < 0;
        if (0..BELLS).find(missing).and_then(make).is_none() {
            return;
        }
    }
}

/// Takes a bell that nobody uses.
pub fn alloc() -> Option<u32> {
    alloc_but(0)
}

/// As [`alloc`], for a sleep that can do without: epoll sets, which cannot, find some left.
pub fn borrow() -> Option<u32> {
    const LEFT: u32 = 16;
    alloc_but(LEFT)
}

fn alloc_but(left: u32) -> Option<u32> {
    page_fd()?;
    let _g = LOCK.lock();
    if used().count_zeros() <= left {
        return None;
    }
    let spare = spare();
    if spare.count_ones() <= SPARE / 2 {
        crate::bg::provide_bells();
    }
    let of = if spare == 0 { !USED.load(Relaxed) } else { spare };
    let k = of.trailing_zeros() as usize;
    if k >= BELLS {
        None
    } else {
        take(k)
    }
}

/// Gives a bell back.
pub fn free(k: u32) {
    UNAWARE[k as usize % BELLS].store(0, SeqCst);
    USED.fetch_and(!(1 << k), Release);
}

/// The bells that exist, as a set of bits.
pub fn used() -> u64 {
    USED.load(Acquire)
}

/// The bell's eventfd.
pub fn fd(k: u32) -> c_int {
    FDS[k as usize % BELLS].load(Acquire)
}

fn word(k: u32) -> Option<&'static AtomicU32> {
    // SAFETY: the page is never unmapped, and all-zero is a valid value.
    unsafe { PAGE.load(Acquire).as_ref() }.map(|p| &p.sleep[k as usize % BELLS])
}

/// Says that the caller is about to sleep at bell `k`; it must look once more for work after this.
pub fn sleep_begin(k: u32) {
    SLEEPERS[k as usize % BELLS].fetch_add(1, SeqCst);
    renew(k);
    full_fence();
}

/// Says that the caller sleeps no more.
pub fn sleep_end(k: u32) {
    SLEEPERS[k as usize % BELLS].fetch_sub(1, SeqCst);
    renew(k);
}

/// Gives the word a new value for the present number of sleepers, so that peers ring again.
pub fn renew(k: u32) {
    let Some(w) = word(k) else { return };
    let mut v = w.load(Relaxed);
    loop {
        let asleep = u32::from(asleep(k));
        match w.compare_exchange_weak(v, ((v | 1).wrapping_add(1)) | asleep, SeqCst, Relaxed) {
            Ok(_) => return,
            Err(now) => v = now,
        }
    }
}

/// Whether somebody sleeps at bell `k`.
pub fn asleep(k: u32) -> bool {
    let k = k as usize % BELLS;
    SLEEPERS[k].load(SeqCst) > 0 || {
        let place = UNAWARE[k].load(SeqCst);
        place != 0 && sleepers::any(place)
    }
}

/// The bell is in use from now on, or is not any more: threads that sleep at `place` without knowing of it are counted,
/// too, until they wake.
pub fn count_unaware(k: u32, place: usize) {
    {
        let _g = LOCK.lock();
        sleepers::see_all();
        let there = sleepers::any(place);
        UNAWARE[k as usize % BELLS].store(if there { place } else { 0 }, SeqCst);
    }
    renew(k);
}

/// Wakes who sleeps at bell `k` of this process.
pub fn ring(k: u32) {
    ring_fd(fd(k));
}

/// Wakes who waits for the eventfd `fd`.
pub fn ring_fd(fd: c_int) {
    let one = 1u64;
    if fd >= 0 {
        // SAFETY: eight readable bytes, as an eventfd wants.
        let _ = unsafe { sys!(libc::SYS_write, fd, &one, 8) };
    }
}

/// Makes an eventfd unreadable again, for waiters that are not edge-triggered.
pub fn clear(k: u32) {
    let mut v = 0u64;
    // SAFETY: eight writable bytes.
    let _ = unsafe { sys!(libc::SYS_read, fd(k), &mut v, 8) };
}

/// In a forked child: the bells are the parent's.
pub fn reset_after_fork() {
    LOCK.reset_after_fork();
    PAGE.store(core::ptr::null_mut(), Relaxed);
    sys::close(PAGE_FD.swap(-1, Relaxed));
    for k in 0..BELLS {
        SLEEPERS[k].store(0, Relaxed);
        UNAWARE[k].store(0, Relaxed);
        let fd = FDS[k].swap(-1, Relaxed);
        if fd >= 0 {
            sys::close(fd);
        }
    }
    USED.store(0, Relaxed);
}
