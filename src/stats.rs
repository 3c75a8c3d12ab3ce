//! What a process tells about itself: a page of totals and one record per
//! connection, in a memfd that `ringsock stat` reads from outside and that
//! the report at exit is written from.
//!
//! The memfd is named [`MEMFD_NAME`]; readers find it among the fds of a
//! process. All fields are atomics without padding games: a reader may see a
//! record in the middle of a change, so every record carries a generation
//! that is odd while the record is in use.

use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicU8, Ordering};

/// Name of the memfd, as `/proc/PID/fd` shows it: `/memfd:ringsock-state`.
pub const MEMFD_NAME: &str = "ringsock-state";
/// First word of the memfd.
pub const MAGIC: u64 = u64::from_le_bytes(*b"ringstat");
/// Layout version; a reader refuses any other.
pub const VERSION: u32 = 3;
/// Offset of the first [`ConnStats`] in the memfd, in bytes.
pub const CONNS_OFFSET: usize = 4096;

/// Byte counts and events, summed over connections.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Totals {
    /// Application bytes sent through kernel TCP.
    pub tx_bytes_tcp: AtomicU64,
    /// Application bytes sent through rings.
    pub tx_bytes_ring: AtomicU64,
    /// Application bytes received through kernel TCP.
    pub rx_bytes_tcp: AtomicU64,
    /// Application bytes received through rings.
    pub rx_bytes_ring: AtomicU64,
    /// Completed upgrades.
    pub upgrades: AtomicU64,
    /// Completed returns.
    pub returns: AtomicU64,
    /// TCP connections ever seen.
    pub connections: AtomicU64,
    /// Connections that were upgraded at least once.
    pub upgraded: AtomicU64,
    /// The others, by why they never left TCP.
    pub stayed: Tally,
    /// `returns`, by why they returned. Those of open connections, too.
    pub returned: Tally,
}

/// A count for each [`Why`].
#[repr(C)]
#[derive(Debug)]
pub struct Tally([AtomicU32; Why::COUNT]);

impl Default for Tally {
    fn default() -> Tally {
        Tally([const { AtomicU32::new(0) }; Why::COUNT])
    }
}

impl Tally {
    /// One more.
    pub fn count(&self, why: Why) {
        if let Some(n) = self.0.get(why as usize) {
            n.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A copy.
    pub fn get(&self) -> [u32; Why::COUNT] {
        core::array::from_fn(|i| self.0[i].load(Ordering::Relaxed))
    }
}

/// Head of the memfd.
#[repr(C)]
pub struct Header {
    /// [`MAGIC`], written last.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// The process that the records belong to.
    pub pid: AtomicU32,
    /// How many [`ConnStats`] records may be in use: all at lower indices have been used at least once.
    pub used: AtomicU32,
    /// How many records there is room for.
    pub capacity: AtomicU32,
    /// Sums over connections that are closed.
    pub closed: Totals,
    /// Program name (comm), NUL padded.
    pub program: [AtomicU8; 64],
}

/// One end of a connection: an IPv6 address (IPv4 is mapped) and a port.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Endpoint {
    /// Address bytes in network order.
    pub addr: [AtomicU8; 16],
    /// Port in host order; 0 while unknown.
    pub port: AtomicU16,
}

impl Endpoint {
    /// It is known now.
    pub fn note(&self, (addr, port): &([u8; 16], u16)) {
        for (to, b) in self.addr.iter().zip(addr) {
            to.store(*b, Ordering::Relaxed);
        }
        self.port.store(*port, Ordering::Release);
    }

    /// The address and the port; the port is 0 while they are unknown.
    pub fn get(&self) -> ([u8; 16], u16) {
        let port = self.port.load(Ordering::Acquire);
        (core::array::from_fn(|i| self.addr[i].load(Ordering::Relaxed)), port)
    }
}

/// One connection.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct ConnStats {
    /// Odd while the record is in use.
    pub gen: AtomicU32,
    /// A [`Why`].
    pub why: AtomicU8,
    /// 0 none, 1 `shm`, 2 `verbs`.
    pub link: AtomicU8,
    /// Path of the sending direction: 0 `tcp`, 1 `ring`.
    pub path_tx: AtomicU8,
    /// Path of the receiving direction: 0 `tcp`, 1 `ring`.
    pub path_rx: AtomicU8,
    /// Our end.
    pub local: Endpoint,
    /// The other end.
    pub peer: Endpoint,
    /// See [`Totals`].
    pub tx_bytes_tcp: AtomicU64,
    /// See [`Totals`].
    pub tx_bytes_ring: AtomicU64,
    /// See [`Totals`].
    pub rx_bytes_tcp: AtomicU64,
    /// See [`Totals`].
    pub rx_bytes_ring: AtomicU64,
    /// Completed upgrades.
    pub upgrades: AtomicU32,
    /// Completed returns.
    pub returns: AtomicU32,
}

impl ConnStats {
    /// Our end and the other, once they are known.
    pub fn ends(&self) -> Option<[([u8; 16], u16); 2]> {
        let ends = [self.local.get(), self.peer.get()];
        (ends[0].1 != 0 && ends[1].1 != 0).then_some(ends)
    }
}

macro_rules! why {
    ($($(#[doc = $doc:literal])* $name:ident = $n:literal, $text:literal;)*) => {
        /// Why a connection is on kernel TCP.
        #[repr(u8)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Why { $($(#[doc = $doc])* $name = $n,)* }
        impl Why {
            /// One more than the largest number.
            pub const COUNT: usize = { let mut n = 0; $(if n <= $n { n = $n + 1; })* n };
            /// The reason for a stored number, whichever end's it is.
            pub fn from_u8(n: u8) -> Why { match n & !AT_PEER { $($n => Why::$name,)* _ => Why::New } }
            /// The reason in words, for people.
            pub const fn text(self) -> &'static str { match self { $(Why::$name => $text,)* } }
            /// The same, where it is the other end that has it.
            const fn text_of_peer(self) -> &'static str {
                match self { $(Why::$name => concat!("the other end says: ", $text),)* }
            }
        }
    };
}

/// In a stored [`Why`]: it is the other end's reason.
pub const AT_PEER: u8 = 0x80;

/// A stored reason in words.
pub fn text_of(stored: u8) -> &'static str {
    let why = Why::from_u8(stored);
    if stored & AT_PEER == 0 || why == Why::None {
        why.text()
    } else {
        why.text_of_peer()
    }
}

why! {
    /// Not on TCP, or nothing to say.
    None = 0, "";
    /// Too little traffic so far.
    New = 1, "too little traffic so far";
    /// `RINGSOCK_LINKS` allows no link.
    LinksOff = 2, "links are switched off (RINGSOCK_LINKS)";
    /// The rules file says so.
    Rules = 3, "excluded by the rules file";
    /// Looking for the peer.
    Looking = 4, "looking for the peer";
    /// Nobody answered.
    NoPeer = 5, "the peer is not preloaded, keeps it on TCP, or cannot be reached";
    /// Not the same host.
    OtherHost = 6, "the peer is on another host and no RDMA link is in use";
    /// The peer speaks another version.
    Version = 7, "the peer has another version of ringsock";
    /// The peer refused.
    Refused = 8, "the peer refused";
    /// `RINGSOCK_PEERS` does not allow this user.
    PeerUser = 9, "the peer's user is not allowed (RINGSOCK_PEERS)";
    /// Kernel counts differ from ours.
    Bypass = 10, "bytes were moved behind the library's back";
    /// The way the program waits is not visible.
    Unseen = 11, "the program waits for it in a way the library does not see";
    /// Several processes hold the socket.
    Shared = 12, "several processes hold the socket";
    /// Out of memory, addresses, fds, slots or threads.
    Resources = 13, "no memory, addresses, fds, slots or thread for a ring";
    /// Half closed.
    HalfClosed = 14, "half closed before it could move";
    /// A socket feature that rings lack, found in use.
    Feature = 15, "a socket feature in use that rings do not have";
    /// Came back from a ring.
    Returned = 16, "returned from a ring";
    /// A fork child waits for it.
    Forked = 17, "inherited over fork or exec";
    /// libc reads it.
    Libc = 21, "the C library reads it by itself (stdio, asynchronous I/O)";
    /// libc writes it, or does else what is not seen.
    LibcWrites = 23, "the C library or the kernel uses it by itself (stdio, asynchronous I/O)";
    /// `MSG_OOB`.
    Urgent = 24, "urgent data (MSG_OOB)";
    /// `sendmsg` with control data that TCP takes notice of.
    Control = 25, "control data with what is sent (sendmsg)";
    /// `MSG_ZEROCOPY`, `TCP_ZEROCOPY_RECEIVE`.
    ZeroCopy = 26, "zero-copy by the kernel (MSG_ZEROCOPY, TCP_ZEROCOPY_RECEIVE)";
    /// `MSG_FASTOPEN`.
    FastOpen = 27, "a connection is opened with its first bytes (MSG_FASTOPEN)";
    /// `O_ASYNC`.
    Signals = 28, "signals for its events (O_ASYNC, FIOASYNC)";
    /// `SO_TIMESTAMP` and its kin.
    Stamps = 29, "timestamps (SO_TIMESTAMP, SO_TIMESTAMPNS, SO_TIMESTAMPING)";
    /// `SO_PEEK_OFF`.
    PeekOff = 30, "looks from an offset (SO_PEEK_OFF)";
    /// `SO_ATTACH_FILTER`, `SO_ATTACH_BPF`.
    Filter = 31, "a filter of packets (SO_ATTACH_FILTER, SO_ATTACH_BPF)";
    /// `TCP_ULP`.
    Ulp = 32, "a protocol of the kernel's above TCP, like kernel TLS (TCP_ULP)";
    /// `TCP_REPAIR`.
    Repair = 33, "the connection is frozen or restored (TCP_REPAIR)";
    /// `splice`.
    Spliced = 34, "bytes are moved within the kernel (splice)";
    /// `io_uring_setup`, `dlmopen`, a filter of system calls, or threads that do not share their fds.
    Confined = 35, "the program uses io_uring or a second C library, confines its system calls, or gives a thread fds of its own";
    /// The peer began the return.
    PeerLeft = 36, "the other end took it back to TCP";
    /// A process that it belonged to is gone.
    Gone = 37, "a process that had it has ended";
    /// The link broke.
    LinkLost = 38, "the RDMA link was lost";
    /// The link holds far more memory than is used.
    Unused = 39, "its link was hardly used, and ends";
    /// `RINGSOCK_CHAOS`.
    Chaos = 40, "a random move (RINGSOCK_CHAOS)";
    /// A socket from elsewhere.
    Network = 41, "its socket is of another network namespace than the one in which peers are looked for";
    /// `dup2` onto a number in use, in a program with threads.
    Replaced = 42, "its number was another file's before, by which threads may just be calling the kernel (dup2)";
    /// No RDMA device.
    NoDevice = 19, "the peer is on another host, and this one has no RDMA device that may be used";
    /// No way by RDMA.
    NoWay = 20, "the peer cannot be reached by RDMA";
    /// `ringsock off`.
    Operator = 22, "switched off by the operator (ringsock off)";
    /// The library could not set itself up.
    Broken = 18, "the library could not set itself up in this process";
}
