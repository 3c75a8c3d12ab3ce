//! What only this process knows of a connection.

use super::*;

/// What this process alone knows: who waits here.
#[derive(Default)]
pub struct Local {
    /// Guards the rest.
    pub lock: Lock,
    /// An fd number of it in this process, or -1: then this process does not touch the socket any more.
    pub fd: AtomicI32,
    /// How many fd numbers of this process are it.
    pub fds: AtomicU32,
    /// The epoll set that a fresh one is in.
    pub young: crate::epoll::Young,
    /// Whether the epoll sets of this process know it as managed. Under `lock`.
    pub managed: AtomicBool,
    /// Epoll sets that have it, as `(set, fd)`.
    pub items: UnsafeCell<Vec<(*const crate::epoll::Set, i32)>>,
    /// A set that children have was closed while the kernel's had it: what is noted of its items is not all that they find.
    pub left_in_a_set: AtomicBool,
    /// In how many epoll sets it may be that were made before a fork, of which only the kernel knows in this process.
    pub blind: AtomicU32,
    /// How many sets and threads that is: where it is not one, no single bell will do.
    pub watchers: AtomicU32,
    /// Counts the changes of `watchers`: who asks a peer for a hint must not name the bell of a place that is none any more.
    pub seats: AtomicU32,
    /// Threads in `poll` that wait for it.
    pub waiters: UnsafeCell<Vec<*const Waiter>>,
    /// Threads that are inside a sending system call.
    pub tx_inflight: AtomicU32,
    /// Threads that are inside a receiving system call.
    pub rx_inflight: AtomicU32,
    /// Threads that wait in the kernel for the socket to become readable; see also [`Local::is_peeked`].
    pub peekers: AtomicU32,
    /// Of the record that this one took the connection over from, in whose name threads may still wait.
    pub former: AtomicPtr<Local>,
    /// Threads asleep until readable / writable.
    pub fut_rx: AtomicU32,
    /// See `fut_rx`.
    pub fut_tx: AtomicU32,
    /// Calls that hold it open; see [`crate::pins`].
    pub pins: AtomicU32,
    /// Its last number is closed, and calls hold it open: `fd` is the library's own.
    pub unnamed: AtomicBool,
    /// `ask::*`.
    pub asked: AtomicU32,
    /// Next in the background thread's inbox.
    pub next: AtomicPtr<Conn>,
    /// Given to the background thread.
    pub submitted: AtomicBool,
    /// The upgrade whose memory is mapped in this process: by itself, or by a parent before the fork.
    pub mapped: AtomicU32,
    /// What was kept of it when this process was forked; see [`crate::kept::Kept::id`].
    pub kept: AtomicU32,
    /// An inherited connection whose rings this process uses itself, because the process that upgraded it
    /// cannot bring it back any more.
    pub direct: AtomicBool,
    /// A visit took too long: later ones do not wait.
    pub hasty: AtomicBool,
    /// When it was first seen that nobody has the connection any more, which was left to others; 0: not yet.
    pub left_since: AtomicI64,
    /// By which it is said that this image uses what it has inherited, see [`crate::foreign::fetch`]; 0: nothing.
    pub sign: AtomicI32,
    /// The process that it was taken from by `pidfd_getfd`, see [`crate::foreign::got`]; 0: none.
    pub taken_from: AtomicU32,
}

impl Local {
    /// So many sets and threads have left it. Under `lock`.
    pub fn watchers_left(&self, n: usize) {
        self.watchers.fetch_sub(n as u32, SeqCst);
        self.seats.fetch_add(1, SeqCst);
    }

    /// How many there are now. Under `lock`.
    pub fn set_watchers(&self, n: usize) {
        self.watchers.store(n as u32, SeqCst);
        self.seats.fetch_add(1, SeqCst);
    }

    /// Whether a thread is still inside a call on the record's former life.
    pub fn is_haunted(&self) -> bool {
        [&self.tx_inflight, &self.rx_inflight, &self.peekers, &self.fut_rx, &self.fut_tx, &self.pins]
            .iter()
            .any(|w| w.load(SeqCst) != 0)
    }

    /// Whether threads wait in the kernel for the socket to become readable, which the mark is to wake.
    pub fn is_peeked(&self) -> bool {
        // SAFETY: null, or a record's part, which is never freed.
        let former = unsafe { self.former.load(SeqCst).as_ref() };
        self.peekers.load(SeqCst) > 0 || former.is_some_and(|f| f.peekers.load(SeqCst) > 0)
    }

    /// In a forked child: nothing was asked, and nobody is inside a call.
    pub fn begin_anew(&self) {
        self.asked.store(0, Relaxed);
        self.clear_counts();
    }

    /// For a new connection: nobody is inside a call. But the record may be in the background thread's inbox since its
    /// former life, and must not be put there twice. What was asked of that one does this one no harm.
    pub fn clear_counts(&self) {
        self.former.store(core::ptr::null_mut(), Relaxed);
        self.left_since.store(0, Relaxed);
        for w in [&self.tx_inflight, &self.rx_inflight, &self.peekers, &self.fut_rx, &self.fut_tx, &self.pins] {
            w.store(0, Relaxed);
        }
        for b in [&self.submitted, &self.direct, &self.hasty, &self.unnamed, &self.left_in_a_set] {
            b.store(false, Relaxed);
        }
    }
}
