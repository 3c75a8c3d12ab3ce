//! What the conductor knows of the connections: enough to choose only calls whose outcome the kernel determines, and
//! to wait until what a call has set off has arrived.

use std::os::fd::RawFd;

/// One end of a connection. Ends `2n` and `2n + 1` are each other's peers.
#[derive(Clone, Default, Debug)]
pub struct End {
    /// Bytes that have been sent to this end and not been taken.
    pub rx: i64,
    /// Bytes that this end has taken.
    pub taken: i64,
    /// Bytes that this end has sent.
    pub sent: i64,
    /// `shutdown` for reading was called here.
    pub shut_rd: bool,
    /// `shutdown` for writing was called here.
    pub shut_wr: bool,
    /// The peer's stream has ended.
    pub peer_fin: bool,
    /// A reset has come.
    pub reset: bool,
    /// No process holds this end any more.
    pub closed: bool,
    /// `O_NONBLOCK`.
    pub nonblock: bool,
    /// `SO_RCVLOWAT`.
    pub lowat: i64,
    /// `SO_RCVTIMEO` in ms, 0: none.
    pub rcvtimeo: i64,
    /// `SO_LINGER` with time 0.
    pub linger0: bool,
    /// It was filled until it took no more; only a drain by the peer is determined then.
    pub full: bool,
    /// Something is on its way here.
    pub dirty: bool,
    /// A thread sleeps in a call on it, and wants so many bytes (1: any readiness).
    pub sleeper: Option<i64>,
    /// It was given to an epoll set.
    pub watched: bool,
    /// Its end may not be acknowledged yet. When it is, at any time within 40 ms, the kernel makes an edge.
    pub unacked: bool,
}

impl End {
    /// Whether both directions have ended in order.
    pub fn finished(&self) -> bool {
        self.shut_wr && self.peer_fin
    }

    /// Whether a receive ends at once whatever is there.
    pub fn ended(&self) -> bool {
        self.peer_fin || self.reset || self.shut_rd
    }

    /// Whether `poll` is to say `POLLRDHUP`.
    pub fn rdhup(&self) -> bool {
        self.ended()
    }

    /// Whether `poll` is to say `POLLHUP`.
    pub fn hup(&self) -> bool {
        self.reset || (self.shut_wr && (self.peer_fin || self.shut_rd))
    }
}

/// What an fd is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Obj {
    /// An end of a connection.
    End(usize),
    /// A listener.
    Listener,
    /// An epoll set.
    Set(usize),
    /// Something that can be written and read without waiting.
    Other,
}

/// An fd of a process.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Entry {
    /// The number.
    pub fd: RawFd,
    /// What it is.
    pub obj: Obj,
}

/// The ends of all connections.
#[derive(Default)]
pub struct Model {
    /// The ends.
    pub ends: Vec<End>,
}

/// The other end.
pub fn peer(e: usize) -> usize {
    e ^ 1
}

impl Model {
    /// One more connection: its first end.
    pub fn connection(&mut self) -> usize {
        let e = self.ends.len();
        for _ in 0..2 {
            self.ends.push(End { lowat: 1, ..End::default() });
        }
        e
    }

    fn reset(&mut self, e: usize) {
        let end = &mut self.ends[e];
        if !end.closed && !end.reset {
            end.reset = true;
            end.dirty = true;
        }
    }

    fn fin(&mut self, e: usize) {
        let end = &mut self.ends[e];
        if !end.closed && !end.reset {
            end.peer_fin = true;
            end.dirty = true;
        }
    }

    /// An end has sent bytes.
    pub fn sent(&mut self, e: usize, n: i64) {
        if n <= 0 {
            return;
        }
        self.ends[e].sent += n;
        let p = &mut self.ends[peer(e)];
        if p.closed {
            self.reset(e);
        } else if p.shut_rd && p.shut_wr {
            // The kernel answers data that nobody can ever read by a reset (RFC 1122, 4.2.2.13).
            self.reset(e);
            self.reset(peer(e));
        } else {
            p.rx += n;
            p.dirty = true;
        }
    }

    /// An end has taken bytes.
    pub fn took(&mut self, e: usize, n: i64) {
        if n > 0 {
            self.ends[e].rx -= n;
            self.ends[e].taken += n;
        }
    }

    /// `shutdown` has succeeded.
    pub fn shutdown(&mut self, e: usize, how: i32) {
        let end = &mut self.ends[e];
        end.dirty = true;
        if how != libc::SHUT_WR {
            end.shut_rd = true;
        }
        if how != libc::SHUT_RD && !end.shut_wr {
            end.shut_wr = true;
            end.unacked = true;
            if !end.reset {
                self.fin(peer(e));
            }
        }
    }

    /// The last fd of an end was closed.
    pub fn closed(&mut self, e: usize) {
        let end = &mut self.ends[e];
        end.closed = true;
        end.dirty = false;
        if end.reset || end.finished() {
            return;
        }
        if end.rx > 0 || end.linger0 {
            self.reset(peer(e));
        } else if !end.shut_wr {
            self.fin(peer(e));
        }
    }
}
