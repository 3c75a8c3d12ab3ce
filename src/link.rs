//! A link: two processes of one host that show each other a segment of memory.
//!
//! Both ends hold a `SOCK_SEQPACKET` Unix socket whose other end is the peer
//! process; it carries the [`Msg`]s of the rendezvous, and its end is the end
//! of the link.

use crate::bell;
use crate::conn::{ask, Conn};
use crate::desk;
use crate::layout::*;
use crate::log::{log, Level};
use crate::remote::{self, Half, Remote};
use crate::shm::{self, Map};
use crate::side::{wake_word, Side};
use crate::sync::{futex_wake, Lock};
use crate::sys::{self, sys, Errno, SysResult};
use crate::wire::Nonce;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use libc::c_int;

/// The two ends of a TCP connection: addresses (IPv4 mapped to IPv6) and ports, of who connected first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(C)]
pub struct Tuple {
    /// The connecting end's address.
    pub from: [u8; 16],
    /// The accepting end's address.
    pub to: [u8; 16],
    /// The connecting end's port.
    pub from_port: u16,
    /// The accepting end's port.
    pub to_port: u16,
}

/// Kinds of messages.
pub mod kind {
    /// First word of who dials: version, its process.
    pub const HELLO: u32 = 1;
    /// Answer: a new link; carries segment, bells, bell 0 and wake words.
    pub const WELCOME: u32 = 2;
    /// Answer to `WELCOME`: the dialler's segment, bells, bell 0 and wake words.
    pub const LINKED: u32 = 3;
    /// Answer: we have a link already, expect an `ASK` on it.
    pub const USE: u32 = 4;
    /// Answer: no, for the reason in `a` (a `stats::Why`).
    pub const REFUSE: u32 = 5;
    /// "I connected this; if you accepted it, propose."
    pub const ASK: u32 = 6;
    /// "I accepted this; my slot is `a`, I look for this nonce."
    pub const PROPOSE: u32 = 7;
    /// "Agreed: your slot `a`, mine `b`, I look for this nonce."
    pub const ACCEPT: u32 = 8;
    /// "No, and I shall never use your nonce": your slot `a`, reason `b`.
    pub const REJECT: u32 = 9;
    /// "I read and write your slot `a` no more."
    pub const DETACH: u32 = 11;
    /// Bell `a`; carries its eventfd.
    pub const BELL: u32 = 12;
    /// "I have your bell `a`."
    pub const BELL_OK: u32 = 13;
    /// "I want to use my segment up to piece `a`." (`verbs`)
    pub const NEED: u32 = 14;
    /// "Piece `a` of your segment can be written to me with key `b`." (`verbs`)
    pub const KEYS: u32 = 15;
    /// "I begin nothing more on this link: if you have nothing on it either, let go of it."
    pub const END: u32 = 16;
    /// Answer to `END`: "I have."
    pub const KEEP: u32 = 17;
}

/// One message.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Msg {
    /// `"rs"` and a magic number, so that nonsense is recognised.
    pub magic: u32,
    /// Protocol version of the sender.
    pub version: u32,
    /// See [`kind`].
    pub kind: u32,
    /// See [`kind`].
    pub a: u32,
    /// See [`kind`].
    pub b: u32,
    /// For the future; 0.
    pub features: u32,
    /// The sender's process: random, new after fork.
    pub process: [u8; 16],
    /// See [`kind`].
    pub nonce: Nonce,
    /// See [`kind`].
    pub tuple: Tuple,
}

/// Value of [`Msg::magic`].
pub const MSG_MAGIC: u32 = 0x7273_4b01;
/// The protocol that this build speaks.
pub const VERSION: u32 = 5;
/// Length of a message.
pub const MSG_LEN: usize = size_of::<Msg>();

/// Sends a message with fds, without waiting.
pub fn send_msg(sock: c_int, m: &Msg, fds: &[c_int]) -> SysResult {
    let mut iov = libc::iovec { iov_base: (m as *const Msg).cast_mut().cast(), iov_len: MSG_LEN };
    let mut control = [0u64; 8];
    // SAFETY: all-zero is a valid msghdr.
    let mut h: libc::msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = &mut iov;
    h.msg_iovlen = 1;
    if !fds.is_empty() {
        let n = fds.len().min(4);
        h.msg_control = control.as_mut_ptr().cast();
        h.msg_controllen = 16 + 4 * n;
        // SAFETY: `control` has room for a header of 16 bytes and 4 fds.
        unsafe {
            let c = control.as_mut_ptr() as *mut libc::cmsghdr;
            (*c).cmsg_len = 16 + 4 * n;
            (*c).cmsg_level = libc::SOL_SOCKET;
            (*c).cmsg_type = libc::SCM_RIGHTS;
            core::ptr::copy_nonoverlapping(fds.as_ptr(), control.as_mut_ptr().add(2).cast(), n);
        }
        h.msg_controllen = (16 + 4 * n + 7) & !7;
    }
    // SAFETY: `h` and all that it points to are valid.
    unsafe { sys!(libc::SYS_sendmsg, sock, &h, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) }
}

/// Whether the next message has fds, which would have low numbers if they came here. `EAGAIN`: there is no message yet,
/// and the one that comes next may have some, so none is to be received before this was asked again.
pub fn brings_fds(sock: c_int) -> Result<bool, Errno> {
    // SAFETY: all-zero is a valid msghdr: one without room.
    let mut h: libc::msghdr = unsafe { core::mem::zeroed() };
    // SAFETY: `h` is valid.
    unsafe { sys!(libc::SYS_recvmsg, sock, &mut h, libc::MSG_DONTWAIT | libc::MSG_PEEK) }?;
    Ok(h.msg_flags & libc::MSG_CTRUNC != 0)
}

/// Receives a message and its fds, without waiting. `Ok(None)`: the other end is gone. Fds that
/// are not taken from `fds` (-1 where there is none) must be closed by the caller.
pub fn recv_msg(sock: c_int, fds: &mut [c_int; 4]) -> Result<Option<Msg>, Errno> {
    let mut m = Msg::default();
    let mut iov = libc::iovec { iov_base: (&raw mut m).cast(), iov_len: MSG_LEN };
    let mut control = [0u64; 8];
    // SAFETY: all-zero is a valid msghdr.
    let mut h: libc::msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = &mut iov;
    h.msg_iovlen = 1;
    h.msg_control = control.as_mut_ptr().cast();
    h.msg_controllen = 32;
    *fds = [-1; 4];
    // SAFETY: `h` and all that it points to are valid.
    let n = unsafe { sys!(libc::SYS_recvmsg, sock, &mut h, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) }?;
    let c = control.as_ptr() as *const libc::cmsghdr;
    // SAFETY: the kernel wrote `msg_controllen` bytes of control messages, at most 32.
    unsafe {
        if h.msg_controllen >= 20 && (*c).cmsg_level == libc::SOL_SOCKET && (*c).cmsg_type == libc::SCM_RIGHTS {
            let count = ((*c).cmsg_len - 16) / 4;
            for (i, fd) in fds.iter_mut().enumerate().take(count) {
                *fd = *(control.as_ptr().add(2) as *const c_int).add(i);
            }
        }
    }
    if n == 0 {
        return Ok(None);
    }
    if n != MSG_LEN || m.magic != MSG_MAGIC {
        return Err(libc::EPROTO);
    }
    Ok(Some(m))
}

/// One end of a link. Never freed; its memory is given back once the peer is gone and nobody uses it.
pub struct Link {
    /// The peer process.
    pub process: [u8; 16],
    /// That is this one.
    pub own: bool,
    /// Whether we were dialled (then the peer accepts the connections that we open).
    pub answered: bool,
    /// The Unix socket; -1: none.
    pub sock: c_int,
    /// Our segment.
    pub side: Side,
    seg: Map,
    bells: Map,
    wakes: Map,
    bell_fds: [AtomicI32; BELLS],
    rung: [AtomicU32; BELLS],
    /// Our bells that the peer has, and that it was sent.
    pub bells_known: AtomicU64,
    /// See `bells_known`.
    pub bells_sent: AtomicU64,
    queue_lock: [Lock; QUEUES],
    queue_seen: [UnsafeCell<u64>; QUEUES],
    conns: Box<[AtomicPtr<Conn>]>,
    /// The peer is gone.
    pub dead: AtomicBool,
    /// The peer is asked whether it needs the link; until it has answered nothing is begun on it.
    pub ending: AtomicBool,
    /// Threads that are reading its queues.
    users: AtomicU32,
    /// Slots in use.
    pub slots: AtomicU32,
    /// Of a link to another host: what copies the rings.
    remote: AtomicPtr<Remote>,
}

// SAFETY: shared fields are atomics, or guarded by `queue_lock`; the rest never changes.
unsafe impl Sync for Link {}
// SAFETY: as above.
unsafe impl Send for Link {}

impl Link {
    /// A link over `sock`, from the peer's `[segment, bell page, bell 0, wake words]`. All fds are the desk's; those of
    /// the peer are used up.
    pub fn new(process: [u8; 16], answered: bool, sock: c_int, mut side: Side, fds: [c_int; 4]) -> SysResult<Link> {
        let maps = desk::run(|| {
            side.close_wakes_fd();
            let maps = [
                shm::map_peer(fds[0], SEG_BYTES),
                shm::map_peer(fds[1], 4096),
                shm::map_common(fds[3], size_of::<Wakes>()),
            ];
            for fd in [fds[0], fds[1], fds[3]] {
                sys::close_raw(fd);
            }
            maps
        });
        let bell = desk::place(fds[2]);
        let (placed, sock) = (side.place(), crate::fdhigh::not_for_children(|| desk::place(sock)));
        match (maps, bell, sock, placed) {
            ([Ok(seg), Ok(bells), Ok(wakes)], Ok(bell), Ok(sock), Ok(())) => {
                let link = Self::with(process, answered, sock, side, [seg, bells, wakes]);
                link.set_bell_fd(0, bell);
                Ok(link)
            }
            (maps, bell, sock, _) => {
                [bell, sock].into_iter().flatten().for_each(sys::close);
                let mut error = libc::EINVAL;
                for map in maps {
                    match map {
                        // SAFETY: nobody has seen the mapping.
                        Ok(m) => unsafe { shm::unmap(m) },
                        Err(e) => error = e,
                    }
                }
                // SAFETY: nobody uses the segment yet.
                unsafe { side.destroy() };
                Err(error)
            }
        }
    }

    /// A link by RDMA.
    pub fn new_remote(process: [u8; 16], answered: bool, half: Half) -> Link {
        let (side, mirror, remote) = half.into_parts();
        let none = Map { base: core::ptr::null_mut(), len: 0 };
        let mut l = Self::with(process, answered, -1, side, [mirror, none, none]);
        *l.remote.get_mut() = remote;
        l
    }

    fn with(process: [u8; 16], answered: bool, sock: c_int, side: Side, [seg, bells, wakes]: [Map; 3]) -> Link {
        Link {
            process,
            own: false,
            answered,
            sock,
            side,
            seg,
            bells,
            wakes,
            remote: AtomicPtr::new(core::ptr::null_mut()),
            bell_fds: [const { AtomicI32::new(-1) }; BELLS],
            rung: [const { AtomicU32::new(0) }; BELLS],
            bells_known: AtomicU64::new(1),
            bells_sent: AtomicU64::new(1),
            queue_lock: [const { Lock::new() }; QUEUES],
            queue_seen: [const { UnsafeCell::new(0) }; QUEUES],
            conns: (0..SLOTS).map(|_| AtomicPtr::new(core::ptr::null_mut())).collect(),
            dead: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            users: AtomicU32::new(0),
            slots: AtomicU32::new(0),
        }
    }

    /// What copies the rings, of a link to another host.
    #[inline]
    pub fn remote(&self) -> Option<&Remote> {
        // SAFETY: freed only by `retire`, when nobody uses the link.
        unsafe { self.remote.load(Acquire).as_ref() }
    }

    /// Whether it serves one connection only.
    pub fn is_alone(&self) -> bool {
        self.remote().is_some_and(|r| r.alone.load(Relaxed))
    }

    /// The peer's eventfd for its bell `k`.
    pub fn set_bell_fd(&self, k: u32, fd: c_int) {
        let old = self.bell_fds[k as usize % BELLS].swap(fd, AcqRel);
        if old >= 0 {
            sys::close(old);
        }
    }

    /// The peer's slot `i`.
    pub fn peer_slot(&self, i: u32) -> Option<&Slot> {
        if i as usize >= SLOTS {
            return None;
        }
        // SAFETY: slots lie inside the segment, which is mapped whole. A hole of the sparse file
        // reads as zeroes through a shared mapping, so a lying peer gains nothing.
        Some(unsafe { &*(self.seg.base.add(SLOTS_OFFSET) as *const Slot).add(i as usize) })
    }

    /// First byte of the peer's segment.
    pub fn peer_base(&self) -> *const u8 {
        self.seg.base
    }

    /// Our slot `slot` is `conn`'s (or nobody's).
    pub fn set_conn(&self, slot: u32, conn: *const Conn) {
        self.conns[slot as usize % SLOTS].store(conn.cast_mut(), Release);
    }

    /// Whose slot `slot` of ours is.
    pub fn conn(&self, slot: u32) -> Option<&'static Conn> {
        // SAFETY: connections are never freed.
        unsafe { self.conns[slot as usize % SLOTS].load(Acquire).as_ref() }
    }

    /// Wakes the peer's threads that sleep for the connection of its slot `slot`.
    pub fn wake_peer(&self, slot: u32) {
        if let Some(word) = wake_word(self.wakes, slot) {
            word.fetch_add(1, SeqCst);
            futex_wake(word, i32::MAX);
        }
    }

    /// Hints to the peer that its slot has news, and rings its bell if it sleeps.
    pub fn hint_peer(&self, bell: u32, slot: u32) {
        let k = bell as usize % BELLS;
        self.side.hint(bell, slot);
        crate::sync::full_fence();
        // SAFETY: the page is mapped as long as the link, all-zero is valid.
        let asleep = unsafe { &*(self.bells.base as *const BellPage) }.sleep[k].load(Acquire);
        if asleep & 1 == 1 && self.rung[k].swap(asleep, AcqRel) != asleep {
            bell::ring_fd(self.bell_fds[k].load(Acquire));
        }
    }

    /// The bell that a waiter at our bell `k` names to this peer: `k` if the peer has it, else the background thread's.
    pub fn usable_bell(&self, k: u32) -> u32 {
        if self.bells_known.load(Acquire) & (1 << k) != 0 {
            return k;
        }
        if self.remote().is_some() {
            return 0;
        }
        crate::bg::send_bells();
        0
    }

    /// Whether hints for bell `k` wait.
    #[inline]
    pub fn has_hints(&self, k: u32) -> bool {
        let i = k as usize % QUEUES;
        // SAFETY: the segment is mapped while the caller is counted in `users`; a stale count only
        // costs a look under the lock.
        unsafe {
            let q = &(*(self.seg.base as *const SegHead)).queues[i];
            q.head.load(Acquire) != *self.queue_seen[i].get()
        }
    }

    /// Reads the hints for bell `k` and tells the connections.
    fn drain(&self, k: u32) {
        if self.remote().is_some() {
            return;
        }
        let i = k as usize % QUEUES;
        if !self.has_hints(k) {
            core::sync::atomic::fence(Acquire);
            // Another thread may have taken them, and be about to tell of them.
            if !self.queue_lock[i].is_held() {
                return;
            }
        }
        if self.queue_lock[i].held_by_me() {
            return;
        }
        // Not `try_lock`: who holds it may have looked already, and we are about to sleep.
        let g = self.queue_lock[i].lock();
        // SAFETY: mapped while in use, see above; `queue_seen` is guarded by the lock.
        let (q, seen) = unsafe { (&(*(self.seg.base as *const SegHead)).queues[i], &mut *self.queue_seen[i].get()) };
        let mut batch = [0u32; QUEUE_LEN];
        loop {
            let head = q.head.load(Acquire);
            let mut n = head.wrapping_sub(*seen);
            if n == 0 {
                break;
            }
            let all = n >= QUEUE_LEN as u64 - 8;
            if !all {
                for (j, b) in batch.iter_mut().enumerate().take(n as usize) {
                    *b = q.entries[(*seen as usize + j) % QUEUE_LEN].load(Relaxed);
                }
                // The writer may have lapped us meanwhile.
                core::sync::atomic::fence(Acquire);
                if q.head.load(Relaxed).wrapping_sub(*seen) >= QUEUE_LEN as u64 {
                    continue;
                }
            }
            *seen = head;
            if all {
                n = 0;
                for c in self.conns.iter() {
                    // SAFETY: connections are never freed.
                    if let Some(c) = unsafe { c.load(Acquire).as_ref() } {
                        hear(c);
                    }
                }
            }
            for b in &batch[..n as usize] {
                if let Some(c) = self.conn(*b) {
                    hear(c);
                }
            }
        }
        drop(g);
    }

    /// Gives the memory back if nobody uses it. Only for the background thread, once.
    pub fn retire(&self) -> bool {
        if !self.dead.load(SeqCst) || self.slots.load(SeqCst) > 0 || self.users.load(SeqCst) > 0 {
            return false;
        }
        for fd in &self.bell_fds {
            let fd = fd.swap(-1, AcqRel);
            if fd >= 0 {
                sys::close(fd);
            }
        }
        let remote = self.remote.swap(core::ptr::null_mut(), AcqRel);
        // SAFETY: no connection has a slot, no thread reads the queues, and none will: it is dead.
        unsafe {
            self.side.destroy();
            for map in [self.seg, self.bells, self.wakes] {
                shm::unmap(map);
            }
            if !remote.is_null() {
                remote::free(remote);
            }
        }
        true
    }
}

/// There is news of a connection: for whoever waits for it, and for the background thread, where it may not wait until
/// somebody does. A peer that has begun its mark, which cannot come, says so once, to a program that may only send.
fn hear(c: &Conn) {
    c.notify();
    let unconfirmed = c.connector.load(Relaxed) && !c.confirmed.load(SeqCst) && c.is_ours();
    if c.is_hurried() || c.lingers() || unconfirmed {
        c.ask(ask::PUMP);
    }
}

/// Whether `RLIMIT_AS` leaves room for a link: its two segments must be little of what the program can still map. Says so once if
/// not.
pub fn has_address_space() -> bool {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let fits = shm::is_little(2 * SEG_BYTES);
    if !fits && !TOLD.swap(true, Relaxed) {
        log(Level::Info, format_args!("RLIMIT_AS leaves no room for a link (512 MiB): connections stay on TCP"));
    }
    fits
}

const MAX_LINKS: usize = 1024;
static LINKS: [AtomicPtr<Link>; MAX_LINKS] = [const { AtomicPtr::new(core::ptr::null_mut()) }; MAX_LINKS];
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Makes a link known to the threads that wait, in the place of a retired one if there is any, because
/// links are never freed. `None`: there are too many.
pub fn publish(l: Link, retired: &mut Vec<&'static Link>) -> Option<&'static Link> {
    let i = LINKS.iter().position(|p| p.load(Relaxed).is_null())?;
    let unused = retired.iter().position(|r| r.users.load(SeqCst) == 0);
    let l: &'static Link = match unused.map(|i| retired.swap_remove(i)) {
        None => Box::leak(Box::new(l)),
        Some(old) => {
            let at = (old as *const Link).cast_mut();
            // A thread that still has the pointer looks at `dead`, which stays true until all is
            // written, and at nothing else before it.
            // SAFETY: nobody uses the retired link, see above; each field is written in its place.
            unsafe {
                (*at).process = l.process;
                (*at).own = l.own;
                (*at).answered = l.answered;
                (*at).sock = l.sock;
                (*at).side = l.side;
                (*at).seg = l.seg;
                (*at).bells = l.bells;
                (*at).wakes = l.wakes;
                (*at).bell_fds = l.bell_fds;
                (*at).rung = l.rung;
                (*at).bells_known = l.bells_known;
                (*at).bells_sent = l.bells_sent;
                (*at).queue_seen = l.queue_seen;
                (*at).ending = l.ending;
                (*at).slots = l.slots;
                (*at).remote = l.remote;
            }
            old.dead.store(false, SeqCst);
            old
        }
    };
    LINKS[i].store((l as *const Link).cast_mut(), SeqCst);
    COUNT.fetch_max(i as u32 + 1, SeqCst);
    Some(l)
}

/// Takes a dead link out of sight.
pub fn withdraw(l: &Link) {
    for p in &LINKS {
        if std::ptr::eq(p.load(Relaxed).cast_const(), l) {
            p.store(core::ptr::null_mut(), SeqCst);
        }
    }
    // Fewer to look at from now on.
    let n = LINKS.iter().rposition(|p| !p.load(Relaxed).is_null()).map_or(0, |i| i + 1);
    COUNT.store(n as u32, SeqCst);
}

/// Calls `f` for every living link until it says true.
fn any(mut f: impl FnMut(&Link) -> bool) -> bool {
    for p in &LINKS[..COUNT.load(Acquire) as usize] {
        // SAFETY: links are leaked; their memory is unmapped only while `users` is 0 and after
        // `dead` was set, which is why both are looked at in this order.
        if let Some(l) = unsafe { p.load(SeqCst).as_ref() } {
            l.users.fetch_add(1, SeqCst);
            let hit = !l.dead.load(SeqCst) && f(l);
            l.users.fetch_sub(1, SeqCst);
            if hit {
                return true;
            }
        }
    }
    false
}

/// Calls `f` for the part of every living link that copies rings to another host.
pub fn each_remote(mut f: impl FnMut(&Remote)) {
    any(|l| {
        l.remote().into_iter().for_each(&mut f);
        false
    });
}

/// Reads all hints for bell `k` and tells the connections.
pub fn drain_hints(k: u32) {
    remote::progress();
    any(|l| {
        l.drain(k);
        if l.own && k != 0 {
            // What this thread has told itself it knows, whoever was to hear of it.
            l.drain(0);
        }
        false
    });
}

/// As [`drain_hints`], for two bells.
pub fn drain_hints_of(k: u32, j: u32) {
    any(|l| {
        l.drain(k);
        if j != k {
            l.drain(j);
        }
        false
    });
}

/// Whether hints for bell `k` wait anywhere.
pub fn any_hints(k: u32) -> bool {
    any(|l| l.has_hints(k))
}

/// In a forked child: the links are the parent's.
pub fn reset_after_fork() {
    for p in &LINKS {
        // SAFETY: links are never freed; what is changed is this process's copy.
        if let Some(l) = unsafe { p.load(Relaxed).as_ref() } {
            l.dead.store(true, Relaxed);
        }
        p.store(core::ptr::null_mut(), Relaxed);
    }
    COUNT.store(0, Relaxed);
    remote::reset_after_fork();
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::conn::Phase;
    use crate::sync::futex_wait;

    fn copy(fd: c_int) -> c_int {
        // SAFETY: copies an fd; what comes of it is this test's.
        unsafe { sys!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 0) }.unwrap() as c_int
    }

    /// Where nothing has come yet it is not known what the next message brings.
    #[test]
    fn fds_are_known_before_they_are_received() {
        let mut ends = [-1; 2];
        // SAFETY: `ends` has room for two.
        unsafe { sys!(libc::SYS_socketpair, libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, ends.as_mut_ptr()) }.unwrap();
        let mut fds = [-1; 4];
        assert_eq!(brings_fds(ends[1]), Err(libc::EAGAIN));
        for with in [false, true, false] {
            let given = if with { &ends[..1] } else { &[] };
            send_msg(ends[0], &Msg { magic: MSG_MAGIC, kind: kind::BELL, ..Msg::default() }, given).unwrap();
            assert_eq!(brings_fds(ends[1]), Ok(with));
            assert!(recv_msg(ends[1], &mut fds).unwrap().is_some());
            assert_eq!(fds[0] >= 0, with);
            fds.iter().filter(|fd| **fd >= 0).for_each(|fd| sys::close_raw(*fd));
            assert_eq!(brings_fds(ends[1]), Err(libc::EAGAIN));
        }
        sys::close_raw(ends[0]);
        assert_eq!(brings_fds(ends[1]), Ok(false));
        assert!(recv_msg(ends[1], &mut fds).unwrap().is_none(), "the end");
        sys::close_raw(ends[1]);
    }

    /// The two ends of a link, as the rendezvous makes them.
    pub fn pair() -> [Link; 2] {
        let sides = [Side::new().unwrap(), Side::new().unwrap()];
        let page = bell::page_fd().unwrap();
        let fds = |s: &Side| [s.fd, page, bell::fd(0), s.wakes_fd()].map(copy);
        let [to_second, to_first] = [fds(&sides[0]), fds(&sides[1])];
        let [first, second] = sides;
        [
            Link::new([1; 16], true, -1, first, to_first).unwrap(),
            Link::new([2; 16], false, -1, second, to_second).unwrap(),
        ]
    }

    #[test]
    fn the_peer_wakes_who_sleeps_at_a_slot() {
        let [a, b] = pair();
        let word = a.side.wake(4095).unwrap();
        let before = word.load(SeqCst);
        let asleep = std::thread::scope(|s| {
            let sleeper = s.spawn(|| futex_wait(word, before, 10_000_000_000));
            // Until it sleeps: the kernel says how many it woke only to who counts them.
            while !sleeper.is_finished() {
                b.wake_peer(4095);
                std::thread::yield_now();
            }
            sleeper.join().unwrap()
        });
        assert_ne!(asleep, Err(libc::ETIMEDOUT));
        assert_ne!(word.load(SeqCst), before);
        assert_eq!(b.side.wake(4095).unwrap().load(SeqCst), 0, "one's own word is the other's");
    }

    #[test]
    fn words_that_cannot_be_written_make_no_link() {
        let side = Side::new().unwrap();
        // Sealed: a segment in the place of the words.
        let (sealed, _) = shm::create_owned(b"test\0", size_of::<Wakes>()).unwrap();
        let fds = [side.fd, bell::page_fd().unwrap(), bell::fd(0), sealed].map(copy);
        assert!(Link::new([3; 16], true, -1, Side::new().unwrap(), fds).is_err());
    }

    /// Nobody may wait for a connection on which the program only sends.
    #[test]
    fn a_mark_that_cannot_come_is_heard_of() {
        let [a, b] = pair();
        let unused = Slot::default();
        for (connector, confirmed) in [(true, false), (true, true), (false, false)] {
            let (conn, _ours, _theirs) = crate::io::tests::armed(&unused);
            conn.connector.store(connector, SeqCst);
            conn.confirmed.store(confirmed, SeqCst);
            b.set_conn(7, conn);
            a.hint_peer(0, 7);
            b.drain(0);
            // (What is asked a background thread may have done already, if another test has one.)
            let asked = conn.local().submitted.load(SeqCst);
            assert_eq!(asked, connector && !confirmed, "connector {connector}, confirmed {confirmed}");
            b.set_conn(7, core::ptr::null());
            conn.set_phase(Phase::Closed);
        }
    }
}
