//! io_urings that the program makes, and gives its requests to, by libc's `syscall()`.
//!
//! libuv (so every Node.js since 20.3) makes one for each of its loops, and changes its epoll sets by it. What is asked of such a
//! ring is looked at before the kernel takes it. A change of a set that is ours to make is made here, and its request becomes one
//! of nothing; what is of no socket passes. Anything else is out of our sight, and then the process's connections stay on TCP.
//!
//! Of a ring that is made or used by system calls which no library sees, or from which the kernel takes requests by itself (libuv 1.45
//! to 1.48 has one more of these, for files), `bg/uring.rs` finds out later what it was used for.

use crate::copy;
use crate::epoll;
use crate::ops::Outcome;
use crate::process;
use crate::sys::{self, sys, SysResult};
use crate::table;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};
use libc::{c_int, c_uint, epoll_event};

// What the kernel's include/uapi/linux/io_uring.h says.
const OFF_RINGS: usize = 0;
/// Where the entries of a ring can be mapped.
pub const OFF_SQES: usize = 0x1000_0000;
/// The size of one.
pub const SQE_BYTES: usize = 64;
/// `IORING_SETUP_CQSIZE`, `_CLAMP`, `_SUBMIT_ALL`, `_COOP_TASKRUN`, `_TASKRUN_FLAG`, `_SINGLE_ISSUER`, `_DEFER_TASKRUN`: with these
/// the kernel takes requests when it is told to, from where they are looked for here.
const ORDINARY: u32 = 1 << 3 | 1 << 4 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 12 | 1 << 13;
const NO_SQARRAY: u32 = 1 << 16;
/// A thread of the kernel's takes requests when they are there.
const SQPOLL: u32 = 1 << 1;
const ENTER_SQ_WAKEUP: c_uint = 1 << 1;
const ENTER_REGISTERED_RING: c_uint = 1 << 4;
/// `IORING_REGISTER_*` that have nothing to do with fds, nor with where requests are: buffers, an eventfd, what there is, who
/// works.
const HARMLESS: [c_uint; 16] = [0, 1, 4, 5, 7, 8, 9, 10, 11, 12, 15, 16, 17, 18, 19, 22];

const OP_NOP: u8 = 0;
const OP_POLL_ADD: u8 = 6;
const OP_CLOSE: u8 = 19;
const OP_EPOLL_CTL: u8 = 29;
/// `IOSQE_FIXED_FILE`: its file is one of those that were registered.
const FIXED_FILE: u8 = 1;
/// `IOSQE_IO_LINK`, `_IO_HARDLINK`.
const LINKED: u8 = 1 << 2 | 1 << 3;
/// `IORING_OP_READV`, `_WRITEV`, `_READ_FIXED`, `_WRITE_FIXED`, `_READ`, `_WRITE`.
const DATA: [u8; 6] = [1, 2, 4, 5, 22, 23];
/// Those that no socket is asked for: of files and their names, of memory, times and other requests. (0, `IORING_OP_NOP`, is
/// what has not been used.)
const NO_SOCKETS: [u8; 25] =
    [0, 3, 8, 11, 12, 14, 15, 17, 18, 19, 20, 21, 24, 25, 28, 31, 32, 35, 36, 37, 38, 39, 51, 52, 55];

/// `struct io_uring_params`, and what it says of the submission ring.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    others: [u32; 7],
    head: u32,
    tail: u32,
    mask: u32,
    entries: u32,
    sq_flags: u32,
    dropped: u32,
    array: u32,
    rest: [u32; 13],
}

/// Where a ring's requests are, in bytes from where it is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    entries: u32,
    head: u32,
    tail: u32,
    /// The list of entries in the order in which they are asked; 0: they are in that order themselves.
    array: u32,
    /// The kernel takes requests when nobody sees it.
    polled: bool,
}

impl Shape {
    /// None if it is not one that could be, or has what is not known here.
    fn of(p: &Params) -> Option<Shape> {
        let array = if p.flags & NO_SQARRAY == 0 { p.array } else { 0 };
        let is_ordinary = p.flags & !(ORDINARY | NO_SQARRAY | SQPOLL) == 0;
        let polled = p.flags & SQPOLL != 0;
        let is_one = is_ordinary && (1..=1 << 15).contains(&p.sq_entries) && p.sq_entries.is_power_of_two();
        let lie = [p.head, p.tail, array].iter().all(|at| at % 4 == 0 && *at < 1 << 24);
        (is_one && lie).then_some(Shape { entries: p.sq_entries, head: p.head, tail: p.tail, array, polled })
    }

    /// How much of the ring is to be mapped.
    fn len(&self) -> usize {
        let array = if self.array == 0 { 0 } else { self.array + 4 * self.entries };
        self.head.max(self.tail).saturating_add(4).max(array) as usize
    }
}

/// One ring that is known. Its number may be another file's by now: what is asked of that is refused by the kernel, and the number
/// is given to another ring when one is made with it.
struct Known {
    /// One more than the number; 0: none, -1: being written.
    fd: AtomicI32,
    entries: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    array: AtomicU32,
    polled: AtomicBool,
}

const MOST: usize = 256;
static KNOWN: [Known; MOST] = [const {
    Known {
        fd: AtomicI32::new(0),
        entries: AtomicU32::new(0),
        head: AtomicU32::new(0),
        tail: AtomicU32::new(0),
        array: AtomicU32::new(0),
        polled: AtomicBool::new(false),
    }
}; MOST];

impl Known {
    fn take(&self, was: c_int, fd: c_int, s: &Shape) -> bool {
        if self.fd.compare_exchange(was, -1, AcqRel, Relaxed).is_err() {
            return false;
        }
        self.entries.store(s.entries, Relaxed);
        self.head.store(s.head, Relaxed);
        self.tail.store(s.tail, Relaxed);
        self.array.store(s.array, Relaxed);
        self.polled.store(s.polled, Relaxed);
        self.fd.store(fd + 1, Release);
        true
    }
}

/// False: there are too many.
fn note(fd: c_int, s: &Shape) -> bool {
    let any = |was: c_int| KNOWN.iter().any(|k| k.fd.load(Relaxed) == was && k.take(was, fd, s));
    any(fd + 1) || any(0) || {
        for k in &KNOWN {
            let old = k.fd.load(Relaxed);
            if old > 0 && !is_ring(old - 1) {
                let _ = k.fd.compare_exchange(old, 0, AcqRel, Relaxed);
            }
        }
        any(0)
    }
}

fn shape_of(fd: c_int) -> Option<Shape> {
    let k = KNOWN.iter().find(|k| fd >= 0 && k.fd.load(Acquire) == fd + 1)?;
    let of = |w: &AtomicU32| w.load(Relaxed);
    let polled = k.polled.load(Relaxed);
    Some(Shape { entries: of(&k.entries), head: of(&k.head), tail: of(&k.tail), array: of(&k.array), polled })
}

/// Whether all that is asked of a ring is looked at here.
pub fn is_known(fd: c_int) -> bool {
    shape_of(fd).is_some_and(|s| !s.polled)
}

/// Whether the fd is a ring's (a system call).
pub fn is_ring(fd: c_int) -> bool {
    use core::fmt::Write;
    const NAME: &[u8] = b"anon_inode:[io_uring]";
    let mut path = crate::config::Text::<32>::EMPTY;
    let _ = write!(path, "/proc/self/fd/{fd}");
    let mut to = [0u8; NAME.len() + 1];
    let at = path.as_bytes_with_nul().as_ptr();
    // SAFETY: the path ends with NUL; `to` has room.
    let n = unsafe { sys!(libc::SYS_readlinkat, libc::AT_FDCWD, at, to.as_mut_ptr(), to.len()) };
    n.is_ok_and(|n| &to[..n] == NAME)
}

/// Whether a request is, or may be, one of a socket.
pub fn asks_a_socket(op: u8, flags: u8, is_socket: impl FnOnce() -> bool) -> bool {
    match op {
        op if NO_SOCKETS.contains(&op) => false,
        op if DATA.contains(&op) => flags & FIXED_FILE != 0 || is_socket(),
        _ => true,
    }
}

/// `io_uring_setup(2)`; `make` is the call.
///
/// # Safety
/// As for the call.
pub unsafe fn setup(params: usize, make: impl FnOnce() -> Outcome) -> Outcome {
    let params = params as *const Params;
    let made = make();
    if let Outcome::Done(fd) = made {
        // SAFETY: the kernel has just written it.
        let shape = unsafe { copy::read(params) }.ok().and_then(|p| Shape::of(&p));
        if !shape.is_some_and(|s| note(fd as c_int, &s)) {
            // Before the program can ask anything of it.
            process::no_more_rings();
        }
    }
    made
}

/// `io_uring_register(2)` is about to be called.
pub fn registering(op: c_uint) {
    // (The highest bit says that the ring itself is one of those that were registered.)
    if !HARMLESS.contains(&op) {
        process::no_more_rings();
    }
}

/// `io_uring_enter(2)` is about to be called: looks at what the kernel is going to take.
///
/// # Safety
/// The requests point to what the program owns.
pub unsafe fn entering(fd: c_int, count: u32, flags: c_uint) {
    let idle = || !process::is_active() || process::is_guest() || !process::rings_allowed();
    if count == 0 && flags & ENTER_SQ_WAKEUP == 0 || table::is_without_tcp() || idle() {
        return;
    }
    let shape = shape_of(fd).filter(|_| flags & ENTER_REGISTERED_RING == 0);
    // (No lock: a change of a set may wait for a return, and a child that is forked meanwhile would find it taken.)
    let passes = shape.and_then(|s| Mapped::new(fd, s).ok()).is_some_and(|ring| {
        // SAFETY: the caller's promise.
        unsafe { ring.look(if ring.shape.polled { ring.shape.entries } else { count }) }
    });
    if !passes {
        process::no_more_rings();
    }
}

/// A ring, for as long as it is looked at. (A mapping that stays would keep the ring alive when the program has closed it.)
struct Mapped {
    shape: Shape,
    rings: usize,
    entries: usize,
}

impl Mapped {
    fn new(fd: c_int, shape: Shape) -> SysResult<Mapped> {
        const TO_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new mappings disturb nothing.
        unsafe {
            let rings = sys!(libc::SYS_mmap, 0, shape.len(), libc::PROT_READ, libc::MAP_SHARED, fd, OFF_RINGS)?;
            let mut m = Mapped { shape, rings, entries: 0 };
            m.entries = sys!(libc::SYS_mmap, 0, m.entries_len(), TO_WRITE, libc::MAP_SHARED, fd, OFF_SQES)?;
            Ok(m)
        }
    }

    fn entries_len(&self) -> usize {
        self.shape.entries as usize * SQE_BYTES
    }

    /// The number at an offset of the shape's.
    fn word(&self, at: u32) -> &AtomicU32 {
        // SAFETY: within what is mapped, and aligned: see `Shape`.
        unsafe { &*((self.rings + at as usize) as *const AtomicU32) }
    }

    /// The next `count` requests. False: one of them only the kernel can do, for a socket.
    ///
    /// # Safety
    /// They point to what the program owns.
    unsafe fn look(&self, count: u32) -> bool {
        let head = self.word(self.shape.head).load(Acquire);
        let there = self.word(self.shape.tail).load(Acquire).wrapping_sub(head);
        let mut linked = false;
        for i in 0..count.min(there).min(self.shape.entries) {
            let at = head.wrapping_add(i) & (self.shape.entries - 1);
            let at = match self.shape.array {
                0 => at,
                array => self.word(array + 4 * at).load(Relaxed),
            };
            if at >= self.shape.entries {
                // The kernel drops it.
                continue;
            }
            // SAFETY: within what is mapped, which is aligned to pages; any bits are valid.
            let r = unsafe { &mut *((self.entries + at as usize * SQE_BYTES) as *mut Request) };
            let passes = match self.shape.polled {
                // The kernel may have it already.
                true => !asks_a_socket(r.op, r.flags, || sys::is_socket(r.fd)),
                // SAFETY: the caller's promise.
                false => unsafe { r.pass(linked) },
            };
            if !passes {
                return false;
            }
            linked = r.flags & LINKED != 0;
        }
        true
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: what was mapped, and nobody has.
        unsafe {
            let _ = sys!(libc::SYS_munmap, self.rings, self.shape.len());
            if self.entries != 0 {
                let _ = sys!(libc::SYS_munmap, self.entries, self.entries_len());
            }
        }
    }
}

/// `struct io_uring_sqe`.
#[repr(C)]
struct Request {
    op: u8,
    flags: u8,
    ioprio: u16,
    fd: c_int,
    off: u64,
    addr: u64,
    len: u32,
    op_flags: u32,
    user_data: u64,
    rest: [u64; 3],
}

impl Request {
    /// Does what is ours to do. False: it is, or may be, something of a socket that only the kernel can do. `linked`: it is not to be
    /// done before the one before it.
    ///
    /// # Safety
    /// It points to what the program owns.
    unsafe fn pass(&mut self, linked: bool) -> bool {
        let is_fixed = self.flags & FIXED_FILE != 0;
        match self.op {
            OP_EPOLL_CTL if self.flags == 0 && !linked => {
                // SAFETY: the caller's promise.
                unsafe { self.change_set() };
                true
            }
            OP_EPOLL_CTL => false,
            // (A set of ours may seem to have something for a moment.)
            OP_POLL_ADD if !is_fixed => !sys::is_socket(self.fd) && epoll::set_of(self.fd).is_none(),
            OP_CLOSE if !is_fixed => table::is_foreign(self.fd),
            op => !asks_a_socket(op, self.flags, || sys::is_socket(self.fd)),
        }
    }

    /// A change of an epoll set.
    ///
    /// # Safety
    /// It points to what the program owns.
    unsafe fn change_set(&mut self) {
        let (set, op, fd) = (self.fd, self.len as c_int, self.off as c_int);
        // SAFETY: the caller's promise.
        match unsafe { epoll::ctl(set, op, fd, self.addr as *mut epoll_event) } {
            Outcome::Done(_) => {
                let user_data = self.user_data;
                // SAFETY: zeroes are a request of nothing.
                *self = unsafe { core::mem::zeroed() };
                (self.op, self.user_data) = (OP_NOP, user_data);
            }
            // The kernel's set does not have it as long as it is managed. What it has is the bell.
            Outcome::Fail(libc::EEXIST) => {
                if let Some(bell) = epoll::bell_of(set) {
                    self.off = bell as u64;
                }
            }
            // The kernel does it, or refuses it for the same reason.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_of_files_or_of_sockets() {
        let (read, recv, poll_add, fsync, nop) = (22, 27, OP_POLL_ADD, 3, OP_NOP);
        assert!(!asks_a_socket(read, 0, || false), "a file");
        assert!(asks_a_socket(read, 0, || true));
        assert!(asks_a_socket(read, FIXED_FILE, || false), "by a number that is not one of its fds");
        for op in [recv, poll_add, 200] {
            assert!(asks_a_socket(op, 0, || false), "{op}");
        }
        for op in [fsync, nop] {
            assert!(!asks_a_socket(op, FIXED_FILE, || true), "{op}");
        }
    }

    #[test]
    fn rings_are_known_by_their_numbers() {
        assert_eq!((size_of::<Params>(), size_of::<Request>()), (120, SQE_BYTES));
        let shape = |entries| Shape { entries, head: 0, tail: 4, array: 64, polled: entries == 8 };
        assert!(!is_known(1000) && !is_known(-1));
        assert!(note(1000, &shape(4)) && note(1001, &shape(8)));
        assert_eq!(shape_of(1000), Some(shape(4)));
        assert!(note(1000, &shape(16)), "the number is another ring's");
        assert_eq!((shape_of(1000), shape_of(1001)), (Some(shape(16)), Some(shape(8))));
        assert!(is_known(1000) && !is_known(1001), "what is asked of one that is polled is not all seen");
        // Those that are no rings make room.
        assert!((2000..2000 + 3 * MOST as c_int).all(|fd| note(fd, &shape(2))));
        assert!(is_known(2000 + 3 * MOST as c_int - 1) && !is_known(1000));
    }

    #[test]
    fn what_cannot_be_is_no_shape() {
        let mut p = Params {
            sq_entries: 8,
            cq_entries: 16,
            flags: 0,
            others: [0; 7],
            head: 0,
            tail: 64,
            mask: 256,
            entries: 264,
            sq_flags: 276,
            dropped: 272,
            array: 448,
            rest: [0; 13],
        };
        let s = Shape::of(&p).unwrap();
        assert_eq!((s.array, s.len()), (448, 480));
        p.flags = NO_SQARRAY;
        assert_eq!(Shape::of(&p).map(|s| (s.array, s.len())), Some((0, 68)));
        p.flags = SQPOLL;
        assert!(Shape::of(&p).unwrap().polled);
        p.flags = 1 << 14;
        assert_eq!(Shape::of(&p), None, "IORING_SETUP_NO_MMAP");
        p.flags = 0;
        p.sq_entries = 7;
        assert_eq!(Shape::of(&p), None);
        p.sq_entries = 8;
        p.head = u32::MAX;
        assert_eq!(Shape::of(&p), None);
    }
}
