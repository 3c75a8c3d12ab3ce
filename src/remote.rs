//! The part of a link that only `verbs` has: a queue pair, and what keeps a copy of each side's rings
//! at the other.
//!
//! With `shm` a peer reads our segment. Here it reads a *mirror* of it in its own memory. The bytes of
//! a ring are written into the mirror by RDMA, each piece with an immediate value that names the slot;
//! what a [`Slot`] says travels as a [`Note`]. The receiver applies both in the order in which their
//! completions come, so that a reader of the mirror sees what a reader of the segment would see: bytes
//! before the cursor that covers them, and the end after the last byte.
//!
//! A peer can write two things only: the pieces of the mirror that hold ring bytes, and the area of its
//! notes. Slots of the mirror are written by this process, from what was checked.
//!
//! Two locks that nobody waits for: who cannot have `post_lock` leaves a bit in `pending` and says so in `left`,
//! and its holder looks again after letting go; who cannot have `poll_lock` while it spins knows that somebody polls.
//! Only who is about to sleep waits for `poll_lock`. Both are leaves.

use crate::conn::Conn;
use crate::desk::{self, kept};
use crate::layout::*;
use crate::link::Msg;
use crate::provider::{Api, Channel, Direct, Limits, Memory, Piece, Request, Write};
use crate::shm::{self, Map};
use crate::side::Side;
use crate::sync::Lock;
use crate::sys::SysResult;
use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

#[cfg(test)]
mod fake;
mod flight;
mod guard;
mod poll;
mod post;
mod short;

use flight::Flight;
pub use guard::{
    before_sleep, hear, hear_in, interrupted, leave_set, link_is, renew_call_set, rouse, Asleep, Looks, Place, BELL,
    CHANNEL, CHANNELS as GUARDED,
};
pub(crate) use poll::{count, reset_after_fork};
pub use poll::{progress, spun};

/// Receives that are kept posted: what the peer may have sent, and we not taken from the completion queue.
pub const RECEIVES: u32 = 256;
/// Writes that may be under way.
const WRITES: usize = 512;
/// See `Remote::silent`.
const SILENT: u64 = 16;
/// Receives of the peer that are kept for telling it that ours are free again.
const RESERVE: u64 = 16;
/// So many receives are used up before the peer is told.
const TELL_AFTER: u64 = 64;
/// The longest single write: the receiver hears of its bytes when all have come.
const PIECE: u64 = 256 << 10;
/// Memory is registered in pieces of this size.
pub const CHUNK: usize = 1 << 20;
/// Pieces of a segment.
pub const CHUNKS: usize = SEG_BYTES / CHUNK;
/// The first piece that holds rings.
pub const FIRST_CHUNK: u32 = (BLOCKS_OFFSET / CHUNK) as u32;
/// Where a segment's notes begin, and the space of one.
const NOTES_OFFSET: usize = 28 << 10;
const NOTE_BYTES: usize = 128;
/// The piece of a segment in front of its slots, which holds the notes, and is registered by itself.
pub const HEAD_BYTES: usize = SLOTS_OFFSET;
/// The index of its keys.
pub const HEAD: usize = CHUNKS;
/// Messages for the background thread.
const INBOX: usize = 128;

const _: () = assert!(size_of::<SegHead>() <= NOTES_OFFSET);
const _: () = assert!(NOTES_OFFSET + RECEIVES as usize * NOTE_BYTES <= HEAD_BYTES);
const _: () = assert!(size_of::<Full>() <= NOTE_BYTES && size_of::<Note>() <= NOTE_BYTES);

/// What an immediate value says: the kind in the two top bits.
mod imm {
    /// Bytes of the ring of a slot (12 bits), and how far we have read the peer's (18 bits, in [`UNIT`]s).
    pub const DATA: u32 = 0;
    /// The first kind.
    #[inline]
    pub fn data(slot: u32, consumed: u64) -> u32 {
        DATA << 30 | slot << 18 | (consumed / UNIT % UNITS) as u32
    }
    /// A note (its number, 8 bits).
    pub const NOTE: u32 = 1;
    /// What cursors are rounded down to.
    pub const UNIT: u64 = 1024;
    pub const UNITS: u64 = 1 << 18;
}

/// Kinds of notes.
mod note {
    /// Only the count of receives.
    pub const RECEIVED: u32 = 0;
    /// The ring of `slot` goes on at `page`, of size `log2`, from `start` on.
    pub const GEO: u32 = 1;
    /// Flags and cursor of `slot`, and at which `consumed` of the receiver its sleeper wants to be told.
    pub const SLOT: u32 = 2;
    /// A [`super::Msg`] follows.
    pub const MESSAGE: u32 = 3;
}

/// What is said of a slot.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Note {
    kind: u32,
    slot: u32,
    /// Receives that the sender has used up and posted again, ever.
    received: u64,
    consumed: u64,
    /// `u64::MAX`: nobody sleeps.
    goal: u64,
    start: u64,
    /// See `Slot::mark_at`.
    mark_at: u64,
    flags: u32,
    page: u32,
    log2: u32,
    reserved: u32,
}

/// A note with a message.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Full {
    kind: u32,
    slot: u32,
    received: u64,
    message: Msg,
}

/// A set of slots that any thread may add to.
struct Bits {
    some: AtomicU64,
    words: [AtomicU64; SLOTS / 64],
}

impl Bits {
    fn add(&self, slot: u32) {
        let w = slot as usize / 64 % self.words.len();
        self.words[w].fetch_or(1 << (slot % 64), SeqCst);
        self.some.fetch_or(1 << w, SeqCst);
    }

    fn has(&self, slot: u32) -> bool {
        self.words[slot as usize / 64 % self.words.len()].load(SeqCst) & (1 << (slot % 64)) != 0
    }

    fn remove(&self, slot: u32) {
        self.words[slot as usize / 64 % self.words.len()].fetch_and(!(1 << (slot % 64)), SeqCst);
    }

    fn is_empty(&self) -> bool {
        self.some.load(SeqCst) == 0
    }

    /// Takes all out, and calls `f` for each.
    fn take(&self, mut f: impl FnMut(u32)) {
        let mut some = self.some.swap(0, SeqCst);
        while some != 0 {
            let w = some.trailing_zeros();
            some &= some - 1;
            let mut bits = self.words[w as usize].swap(0, SeqCst);
            while bits != 0 {
                f(w * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }
}

/// How small sends are gathered while writes are under way: see [`Remote::sent`].
#[derive(Clone, Copy)]
struct Gather {
    /// So many bytes are worth a write of their own.
    bytes: u64,
    /// For so long after a write nobody looks whether it is done, if less than that is to be sent ...
    quiet_ns: i64,
    /// ... and after so long the background thread does.
    look_ns: i64,
}

impl Gather {
    /// A device works while the program gathers.
    const HARDWARE: Gather = Gather { bytes: 8 << 10, quiet_ns: 5_000, look_ns: 20_000 };
    /// A write is done by the processor of whoever posts it, and costs much more than a copy.
    const SOFTWARE: Gather = Gather { bytes: 2 * PIECE, quiet_ns: 100_000, look_ns: 200_000 };
}

/// The last write of a slot's bytes, as long as the next one lies behind it, in a piece of a ring and of registered memory that
/// ends at byte `end`, ever. The request points to the piece beside it.
#[derive(Clone, Copy)]
struct Next {
    end: u64,
    /// What its immediate value says of our reading, in bytes.
    read: u64,
    request: Request,
    piece: Piece,
}

impl Default for Next {
    fn default() -> Next {
        // SAFETY: plain numbers and pointers, for which zeroes are valid.
        unsafe { core::mem::zeroed() }
    }
}

/// How far one of our slots has been copied to the peer.
#[derive(Clone, Copy, Default)]
struct Copied {
    /// Ring bytes written.
    posted: u64,
    /// Geometries announced, and the one that `posted` lies in.
    geos: u32,
    log2: u32,
    start: u64,
    page: u32,
    flags: u32,
    next: Next,
    /// What was said last.
    consumed: u64,
    goal: u64,
    mark_at: u64,
    /// Writes of its bytes under way, and the number of the last write that concerns it.
    flight: Flight,
    last: u64,
    /// How far the peer's bytes had come when one of them was posted last.
    heard: u64,
}

/// What the holder of `post_lock` has.
struct Post {
    /// Writes posted and done, ever.
    posted: u64,
    done: u64,
    /// Up to which number writes may be posted the short way, as known when one went the long way last.
    limit: u64,
    /// After so many more writes one gives a completion.
    silent: u32,
    /// Notes written, ever.
    notes: u64,
    /// Writes that were not the first of their call, and those that give a completion.
    more: u64,
    signaled: u64,
    /// Whose bytes each write carries, `u16::MAX`: nobody's.
    whose: [u16; WRITES],
    copied: [Copied; SLOTS],
}

/// What the holder of `poll_lock` has.
struct Poll {
    /// Completions of the peer's writes taken, and receives posted, ever.
    taken: u64,
    posted: u64,
    notes: u64,
    /// Receives used up that are not posted again yet.
    used: u32,
    /// How often completions were looked for, and the queue was armed.
    looks: u64,
    armed: u64,
}

/// See the module's documentation. Lies in zeroed memory of its own, which is given back with the link.
pub struct Remote {
    api: *const Api,
    /// The provider's; null once it is closed. Changes under both locks.
    id: AtomicPtr<c_void>,
    /// The process that may use it.
    pid: u32,
    /// What its completion queue is called in events of the channel.
    token: u64,
    /// Where that tells of completions.
    pub channel: Channel,
    direct: Direct,
    /// Where a device names the request that it refuses.
    bad: UnsafeCell<*mut Request>,
    inline: u32,
    writes: u64,
    /// Of so many writes in a row one gives a completion, whatever their connections need.
    silent: u32,
    gather: Gather,
    /// Up to so many bytes are sent in the short way, and in the shortest: see `short`.
    short: u64,
    shortest: u64,
    /// A timer for the background thread, which then looks whether writes are done that nobody looks at meanwhile;
    /// -1: there is none, and nobody relies on it.
    timer: AtomicI32,
    /// It is set.
    quiet: AtomicBool,
    /// When a connection's bytes were posted last that give a completion, and how far those of each slot were.
    posted_at: AtomicI64,
    posted_to: [AtomicU64; SLOTS],
    /// Our segment, and the mirror of the peer's.
    seg: *mut u8,
    mirror: *mut u8,
    /// Where the peer has the mirror of our segment.
    there: AtomicU64,
    /// Keys of the pieces of our segment here, and of its mirror there. 0: none; else the key and bit 32.
    lkeys: [AtomicU64; CHUNKS + 1],
    rkeys: [AtomicU64; CHUNKS + 1],
    /// Pieces of the mirror that the peer can write.
    offered: [AtomicU64; CHUNKS / 64],
    /// Nothing can be sent or received any more.
    pub failed: AtomicBool,
    /// What the completion queue is armed for: 0 nothing, 1 the peer's writes, 2 anything.
    armed: AtomicU32,
    /// Somebody could not have `post_lock`: its holder is to look whether there is work.
    left: AtomicBool,
    /// Slots with something to send, and those that wait for writes to be done or for receives.
    pending: Bits,
    waiting: Bits,
    /// Slots of the peer's whose bytes nobody takes any more: see [`Remote::refuse`].
    refusing: Bits,
    /// Writes were done, or the peer has receives again.
    moved: AtomicBool,
    /// Number of the last write known to be done, and receives that the peer has told of.
    done: AtomicU64,
    granted: AtomicU64,
    /// Receives that we have posted again, and what of that the peer was told.
    received: AtomicU64,
    told: AtomicU64,
    post_lock: Lock,
    post: UnsafeCell<Post>,
    poll_lock: Lock,
    poll: UnsafeCell<Poll>,
    /// Whose the peer's slots are.
    conns: [AtomicPtr<Conn>; SLOTS],
    /// The peer's slot, plus 1, for each of ours.
    partners: [AtomicU32; SLOTS],
    /// The cursor at which the peer is to be told of what was read.
    tell_at: [AtomicU64; SLOTS],
    /// Messages for the background thread: written under `poll_lock`, read by the thread.
    inbox: UnsafeCell<[Msg; INBOX]>,
    inbox_in: AtomicU32,
    inbox_out: AtomicU32,
    /// The background thread has messages that did not go out.
    pub wants_to_say: AtomicBool,
    /// It serves one connection only, and ends with it.
    pub alone: AtomicBool,
    /// That one has been there.
    pub served: AtomicBool,
}

// SAFETY: everything that changes is atomic, or guarded as said at the fields.
unsafe impl Sync for Remote {}
// SAFETY: as above.
unsafe impl Send for Remote {}

/// A queue pair that is not a link yet.
pub struct Half {
    /// The provider's.
    pub id: *mut c_void,
    /// Our segment.
    pub side: Side,
    /// Memory for the mirror of the peer's.
    pub mirror: Map,
    /// The peer's keys for the notes in it, and for its first rings.
    pub keys: [u32; 2],
    remote: *mut Remote,
}

impl Half {
    /// Makes queue pair, segment, and mirror for a request or a routed connection, and posts receives.
    /// Where it fails the caller closes the id.
    ///
    /// # Safety
    /// `id` must be such a one of the provider's, and the caller's alone.
    pub unsafe fn new(api: &'static Api, id: *mut c_void, token: u64) -> SysResult<Half> {
        if !crate::link::has_address_space() {
            return Err(libc::ENOSPC);
        }
        let mut side = desk::run(Side::new_remote)?;
        side.place()?;
        let undo = |maps: &[Map], e| {
            for m in maps {
                // SAFETY: nobody has seen it.
                unsafe { shm::unmap(*m) };
            }
            // SAFETY: nobody has seen it.
            unsafe { side.destroy() };
            Err(e)
        };
        let mirror = match shm::anon_shared(SEG_BYTES) {
            Ok(m) => m,
            Err(e) => return undo(&[], e),
        };
        let map = match shm::anon_private(size_of::<Remote>()) {
            Ok(m) => m,
            Err(e) => return undo(&[mirror], e),
        };
        let remote = map.base as *mut Remote;
        let mut limits = Limits::default();
        let mut memory = [Memory::default(); 4];
        let first = FIRST_CHUNK as usize * CHUNK;
        let pieces = [
            (side.base(), HEAD_BYTES, 0),
            (side.base().wrapping_add(first), CHUNK, 0),
            (mirror.base, HEAD_BYTES, 1),
            (mirror.base.wrapping_add(first), CHUNK, 1),
        ];
        if !side.allocate_chunk(FIRST_CHUNK) {
            return undo(&[mirror, map], libc::ENOMEM);
        }
        // SAFETY: `id` is the provider's; the memory stays mapped until it is closed.
        let r = unsafe {
            let mut r = kept::host(|| (api.open)(id, WRITES as u32, RECEIVES, token, &mut limits));
            for ((at, len, remote), to) in pieces.iter().zip(&mut memory) {
                if r == 0 {
                    r = (api.register)(id, *at, *len, *remote, to);
                }
            }
            if r == 0 {
                r = (api.post_recv)(id, RECEIVES);
            }
            r
        };
        if r != 0 {
            return undo(&[mirror, map], r);
        }
        // SAFETY: zeroed memory of the right size, for which zeroes are a valid value; nobody else has it yet.
        unsafe {
            (*remote).api = api;
            (*remote).id = AtomicPtr::new(id);
            (*remote).pid = crate::process::pid();
            (*remote).token = token;
            (api.channel)(id, &raw mut (*remote).channel);
            (*remote).inline = limits.inline;
            (*remote).gather = if limits.software != 0 { Gather::SOFTWARE } else { Gather::HARDWARE };
            (*remote).short = (*remote).gather.bytes.min(flight::LARGE);
            (api.direct)(id, &raw mut (*remote).direct);
            (*remote).short -= 1;
            if (*remote).direct.quiet != 0 {
                (*remote).shortest = (*remote).short.min(limits.inline.into());
            }
            (*remote).timer = AtomicI32::new(-1);
            (*remote).writes = u64::from(limits.writes).min(WRITES as u64);
            (*remote).silent = ((*remote).writes / 4).clamp(1, SILENT) as u32;
            (*(*remote).post.get()).silent = (*remote).silent;
            (*remote).seg = side.base();
            (*remote).mirror = mirror.base;
            (*remote).lkeys[HEAD] = AtomicU64::new(u64::from(memory[0].lkey) | 1 << 32);
            (*remote).lkeys[FIRST_CHUNK as usize] = AtomicU64::new(u64::from(memory[1].lkey) | 1 << 32);
            (*remote).offered[0] = AtomicU64::new(1 << FIRST_CHUNK);
            (*(*remote).poll.get()).posted = RECEIVES.into();
        }
        Ok(Half { id, side, mirror, keys: [memory[2].rkey, memory[3].rkey], remote })
    }

    /// Sets where the peer has the mirror of our segment, and its keys.
    pub fn set_peer(&self, there: u64, keys: [u32; 2]) {
        // SAFETY: ours until the link is made.
        let r = unsafe { &*self.remote };
        r.there.store(there, Relaxed);
        r.rkeys[HEAD].store(u64::from(keys[0]) | 1 << 32, Release);
        r.rkeys[FIRST_CHUNK as usize].store(u64::from(keys[1]) | 1 << 32, Release);
        self.side.enable_chunk(FIRST_CHUNK);
    }

    /// The parts of the link that it becomes.
    pub fn into_parts(self) -> (Side, Map, *mut Remote) {
        (self.side, self.mirror, self.remote)
    }

    /// Gives everything back.
    pub fn destroy(self, api: &Api) {
        // SAFETY: nobody else uses any of it.
        unsafe {
            kept::host(|| (api.close)(self.id));
            self.side.destroy();
            shm::unmap(self.mirror);
            free(self.remote);
        }
    }
}

/// Gives a closed one's memory back.
///
/// # Safety
/// Nothing may use it any more.
pub unsafe fn free(r: *mut Remote) {
    // SAFETY: the caller's promise.
    let timer = unsafe { (*r).timer.load(Relaxed) };
    if timer >= 0 {
        crate::sys::close(timer);
    }
    // SAFETY: as above; `Half::new` mapped it with this size.
    unsafe { shm::unmap(Map { base: r.cast(), len: size_of::<Remote>() }) };
}

impl Remote {
    /// The process that may use it is this one.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.pid == crate::process::pid()
    }

    fn api(&self) -> &Api {
        // SAFETY: set when made; the provider is never unloaded.
        unsafe { &*self.api }
    }

    /// The provider's, if nothing has failed. To be used under one of the locks.
    fn live(&self) -> Option<*mut c_void> {
        let id = self.id.load(Acquire);
        (!id.is_null() && !self.failed.load(Relaxed) && self.is_ours()).then_some(id)
    }

    fn own(&self, slot: u32) -> &Slot {
        // SAFETY: slots lie inside the segment, which is mapped as long as the link.
        unsafe { &*(self.seg.add(SLOTS_OFFSET) as *const Slot).add(slot as usize % SLOTS) }
    }

    /// A slot of the mirror.
    fn peer(&self, slot: u32) -> &Slot {
        // SAFETY: as above, in the mirror.
        unsafe { &*(self.mirror.add(SLOTS_OFFSET) as *const Slot).add(slot as usize % SLOTS) }
    }

    /// The peer's slot `slot` is `conn`'s, whose slot of ours is `own`.
    pub fn pair(&self, slot: u32, own: u32, conn: &Conn) {
        self.partners[own as usize % SLOTS].store(slot + 1, Release);
        self.conns[slot as usize % SLOTS].store((conn as *const Conn).cast_mut(), SeqCst);
    }

    /// The peer's slot `slot` is nobody's any more.
    pub fn part(&self, slot: u32) {
        self.conns[slot as usize % SLOTS].store(core::ptr::null_mut(), SeqCst);
    }

    /// What has not come yet by the peer's slot `slot` comes too late: its end is told, as the kernel answers what comes to
    /// who has shut both directions by a reset.
    pub fn refuse(&self, slot: u32) {
        // What lies in the completion queue has come.
        self.poll(true);
        self.refusing.add(slot);
    }

    fn conn(&self, slot: u32) -> Option<&'static Conn> {
        // SAFETY: connections are never freed.
        unsafe { self.conns[slot as usize % SLOTS].load(Acquire).as_ref() }
    }

    /// Registers piece `chunk` of the mirror. Returns the key for the peer. Only for the background thread.
    pub fn offer_chunk(&self, chunk: u32) -> Option<u32> {
        let at = self.mirror.wrapping_add(chunk as usize * CHUNK);
        let m = self.register(at, 1)?;
        self.offered[chunk as usize / 64].fetch_or(1 << (chunk % 64), Relaxed);
        Some(m.rkey)
    }

    /// Whether piece `chunk` of the mirror is registered.
    pub fn offers(&self, chunk: u32) -> bool {
        self.offered[chunk as usize / 64].load(Relaxed) & (1 << (chunk % 64)) != 0
    }

    /// The peer has registered piece `chunk` of the mirror of our segment: so do we, and use it.
    pub fn take_chunk(&self, side: &Side, chunk: u32, rkey: u32) -> bool {
        if !(FIRST_CHUNK..CHUNKS as u32).contains(&chunk) || self.lkeys[chunk as usize].load(Relaxed) != 0 {
            return false;
        }
        if !side.allocate_chunk(chunk) {
            return false;
        }
        let Some(m) = self.register(self.seg.wrapping_add(chunk as usize * CHUNK), 0) else { return false };
        self.lkeys[chunk as usize].store(u64::from(m.lkey) | 1 << 32, Release);
        self.rkeys[chunk as usize].store(u64::from(rkey) | 1 << 32, Release);
        side.enable_chunk(chunk);
        true
    }

    fn register(&self, at: *mut u8, remote: i32) -> Option<Memory> {
        let id = self.live()?;
        let mut m = Memory::default();
        // SAFETY: a piece of a mapping that outlives the queue pair.
        (unsafe { (self.api().register)(id, at, CHUNK, remote, &mut m) } == 0).then_some(m)
    }

    /// Ends the queue pair. Only for the background thread.
    pub fn close(&self) {
        self.failed.store(true, SeqCst);
        self.log_counts();
        let _p = self.poll_lock.lock();
        let _q = self.post_lock.lock();
        let id = self.id.swap(core::ptr::null_mut(), AcqRel);
        // SAFETY: guarded by `post_lock`.
        unsafe { (*self.post.get()).limit = 0 };
        if !id.is_null() {
            // SAFETY: whoever uses it holds one of the locks, and looks for null then.
            kept::host(|| unsafe {
                (self.api().disconnect)(id);
                (self.api().close)(id);
            });
        }
    }

    /// What the link has cost so far, for who measures.
    pub fn log_counts(&self) {
        let p_guard = self.poll_lock.lock();
        let q_guard = self.post_lock.lock();
        // SAFETY: guarded by the locks.
        let (p, q) = unsafe { (&*self.post.get(), &*self.poll.get()) };
        crate::log::log(
            crate::log::Level::Debug,
            format_args!(
                "verbs: {} writes in {} calls ({} notes, {} with a completion), {} came, {} looks, {} times armed",
                p.posted,
                p.posted - p.more,
                p.notes,
                p.signaled,
                q.taken,
                q.looks,
                q.armed
            ),
        );
        drop((q_guard, p_guard));
        self.work();
    }

    /// Makes the timer by which the background thread looks for writes that are done, and returns it.
    pub fn make_timer(&self) -> Option<i32> {
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: no preconditions.
        let make = || unsafe { crate::sys::sys!(libc::SYS_timerfd_create, libc::CLOCK_MONOTONIC, flags) };
        let fd = crate::fdhigh::not_for_children(|| desk::make(make)).ok()?;
        self.timer.store(fd, SeqCst);
        Some(fd)
    }

    /// Takes a message for the background thread.
    pub fn next_message(&self) -> Option<Msg> {
        let out = self.inbox_out.load(Relaxed);
        if out == self.inbox_in.load(Acquire) {
            return None;
        }
        // SAFETY: written before `inbox_in` said so, and not again before `inbox_out` does.
        let m = unsafe { (*self.inbox.get())[out as usize % INBOX] };
        self.inbox_out.store(out.wrapping_add(1), Release);
        Some(m)
    }
}
