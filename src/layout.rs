//! The memory that one process shows another: one segment per side of a link.
//!
//! A side writes its own segment and maps the peer's read-only, so neither
//! can damage what belongs to the other. Whatever is read from a peer's
//! segment is read once, checked, and then used.

use core::sync::atomic::{AtomicU32, AtomicU64};

/// Size of a segment, in bytes. Sparse: pages exist once they are allocated.
pub const SEG_BYTES: usize = 256 << 20;
/// First word of a segment.
pub const SEG_MAGIC: u64 = u64::from_le_bytes(*b"ringseg\x01");
/// Hint queues of a segment; the receiver's bell number selects one.
pub const QUEUES: usize = 16;
/// Entries of a hint queue.
pub const QUEUE_LEN: usize = 256;
/// Connection slots of a segment.
pub const SLOTS: usize = 4096;
/// Where the slots begin.
pub const SLOTS_OFFSET: usize = 64 << 10;
/// Where ring memory begins.
pub const BLOCKS_OFFSET: usize = 2 << 20;
/// Bells of a process.
pub const BELLS: usize = 64;
/// Ring geometries that may be in force at the same time.
pub const GEOS: usize = 8;

/// "The slot with this number has something for you": written by the segment's owner.
#[repr(C, align(64))]
pub struct HintQueue {
    /// Count of hints ever written. A reader that is more than the length behind looks at every slot.
    pub head: AtomicU64,
    /// Slot numbers **of the reader's side**.
    pub entries: [AtomicU32; QUEUE_LEN],
}

/// Head of a segment.
#[repr(C, align(64))]
pub struct SegHead {
    /// [`SEG_MAGIC`].
    pub magic: AtomicU64,
    /// The hints.
    pub queues: [HintQueue; QUEUES],
}

/// A piece of ring memory in force from offset `start` of the stream on.
#[derive(Default)]
#[repr(C)]
pub struct Geo {
    /// First byte of the stream that lies in it.
    pub start: AtomicU64,
    /// Its place in the segment, in 4 KiB pages.
    pub page: AtomicU32,
    /// Its size as a power of two.
    pub log2: AtomicU32,
}

/// One side's words about one connection.
#[repr(C, align(64))]
pub struct Slot {
    /// Bytes of the ring that the peer may see, ever.
    pub produced: AtomicU64,
    /// [`FIN`], [`CLOSED`], [`ABORT`], [`MARK_BEGUN`], [`MARK_TAKEN`], [`RDSHUT`], [`HURRY`], [`LEAVING`], [`BYE`],
    /// [`REFUSED`], [`BEYOND`], [`DOUBT`].
    pub flags: AtomicU32,
    /// Geometries announced, ever; entry `i` is at `i % GEOS`.
    pub geo_count: AtomicU32,
    /// With [`MARK_BEGUN`]: how many of the program's bytes stand before the mark in the TCP stream, ever. Before that, for a peer
    /// in [`DOUBT`]: how many do so at least.
    pub mark_at: AtomicU64,
    /// Bytes written into the ring, those included that the peer is not to see yet: for when nobody can show them to it any
    /// more. Means nothing where it is less than `produced`.
    pub written: AtomicU64,
    /// When the peer came to have something to read, where it has asked for that: see [`WANT_ORDER`].
    pub order: AtomicU64,
    _pad0: [u8; 24],
    /// Bytes taken out of the peer's ring, ever.
    pub consumed: AtomicU64,
    _pad1: [u8; 56],
    /// What the owner waits for: a counter above [`WANT_SHIFT`], and `WANT_*` bits.
    pub want: AtomicU32,
    /// The owner's bell to ring, and by it the hint queue to use.
    pub bell: AtomicU32,
    /// The peer's `consumed` at which a blocked sender wants to be told.
    pub tx_goal: AtomicU64,
    _pad2: [u8; 48],
    /// Geometries of the owner's ring.
    pub geo: [Geo; GEOS],
}

impl Default for Slot {
    fn default() -> Self {
        // SAFETY: all fields are atomics or padding, for which zeroes are valid.
        unsafe { core::mem::zeroed() }
    }
}

/// The sending direction has ended at `produced`.
pub const FIN: u32 = 1;
/// The owner has closed the connection.
pub const CLOSED: u32 = 2;
/// ... with data unread, or with `SO_LINGER` 0: TCP would reset.
pub const ABORT: u32 = 4;
/// The owner has begun to write its mark into the TCP stream.
pub const MARK_BEGUN: u32 = 8;
/// The owner has taken the peer's mark out of the TCP stream, and reads nothing but the control stream from it.
pub const MARK_TAKEN: u32 = 16;
/// The owner's program has shut its receiving direction.
pub const RDSHUT: u32 = 32;

/// The owner wants both directions back at once: nobody's reading is to be waited for.
pub const HURRY: u32 = 64;

/// The owner sends frames of a return, or is about to.
pub const LEAVING: u32 = 128;
/// The owner's process is about to end: no return is to begin any more.
pub const BYE: u32 = 256;
/// Bytes have come to the owner after its program had shut both directions. Only by RDMA: on one host the sender sees that
/// in time.
pub const REFUSED: u32 = 512;
/// All of the owner's ring was repeated by TCP, and its program may have sent more since, which is nowhere else.
pub const BEYOND: u32 = 1024;
/// What has come by TCP looks like the beginning of the peer's mark, of which nothing has been heard: the owner asks whether it is.
/// Only by RDMA, where the word of a mark may come later than the mark.
pub const DOUBT: u32 = 2048;

/// A hint is wanted when there is something to read.
pub const WANT_RX: u32 = 1;
/// A hint is wanted when `consumed` reaches `tx_goal`.
pub const WANT_TX: u32 = 2;
/// Somebody sleeps on the futex until there is something to read.
pub const FUTEX_RX: u32 = 4;
/// Somebody sleeps on the futex until `consumed` reaches `tx_goal`.
pub const FUTEX_TX: u32 = 8;
/// The owner is in the same process, and wants to know in which order its connections became ready.
pub const WANT_ORDER: u32 = 16;
/// Where the counter in `want` begins; each new wish of hints adds one.
pub const WANT_SHIFT: u32 = 8;

/// The words on which the threads of a link's side sleep, one per slot. The peer adds 1 to wake them, and so can
/// write this memory, and nothing else: to sleep or wake at a word that one may not write, the kernel takes the lock of
/// the process' whole address space (`get_futex_key` in Linux' kernel/futex/core.c), which `malloc`'s own calls hold.
#[repr(C)]
pub struct Wakes {
    /// By the sleeper's slot.
    pub word: [AtomicU32; SLOTS],
}

/// A process's page of sleep words, one per bell, which all its peers map.
#[repr(C)]
pub struct BellPage {
    /// Odd while somebody sleeps at that bell; every sleep has another value.
    pub sleep: [AtomicU32; BELLS],
}

const _: () = assert!(core::mem::size_of::<SegHead>() <= SLOTS_OFFSET);
const _: () = assert!(SLOTS_OFFSET + SLOTS * core::mem::size_of::<Slot>() <= BLOCKS_OFFSET);
const _: () = assert!(core::mem::size_of::<Slot>() == 320);
