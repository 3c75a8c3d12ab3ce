//! Processes on other hosts that were told to come with a queue pair. Whichever connection has led them here may end before
//! they come: the link is for those that follow, too.

use super::*;

/// By the process's id.
#[derive(Default)]
pub(super) struct Awaited(HashMap<[u8; 16], One>);

struct One {
    until: i64,
    listener: u64,
}

impl Awaited {
    /// A process comes, to the listener of this token (0: it has come, and is being answered). Returns the listener that it is
    /// not awaited at any more.
    pub fn begin(&mut self, process: [u8; 16], until: i64, listener: u64) -> u64 {
        let was = self.0.insert(process, One { until, listener });
        was.filter(|was| was.listener != listener).map_or(0, |was| was.listener)
    }

    /// It has come, or does not. Returns the listener that it was awaited at, or 0.
    pub fn end(&mut self, process: &[u8; 16]) -> u64 {
        self.0.remove(process).map_or(0, |was| was.listener)
    }

    /// Whether it comes.
    pub fn has(&self, process: &[u8; 16]) -> bool {
        self.0.contains_key(process)
    }

    /// Whether somebody comes to this listener.
    pub fn is_at(&self, listener: u64) -> bool {
        self.0.values().any(|one| one.listener == listener)
    }

    /// Those that have not come in time.
    pub fn late(&self, now: i64) -> Vec<[u8; 16]> {
        self.0.iter().filter(|(_, one)| one.until <= now).map(|(p, _)| *p).collect()
    }

    /// When the next one is late.
    pub fn due(&self) -> i64 {
        self.0.values().map(|one| one.until).min().unwrap_or(i64::MAX)
    }
}

impl Bg {
    /// A search has ended: so does what it had begun, but for a link that may be about to be made, which others can use.
    pub(in crate::bg) fn rdma_let_go(&mut self, token: u64) {
        let goes_on = match self.rdma.places.get(&token) {
            Some(Place::Dial { .. }) => !config::get().strict,
            Some(Place::Listener { .. }) => self.rdma.awaited.is_at(token),
            _ => false,
        };
        if !goes_on {
            self.rdma_drop(token);
        }
    }

    /// A process is expected to make a link with us, at this listener ([`Awaited::begin`]).
    pub(super) fn rdma_expects(&mut self, process: &[u8; 16], span: i64, listener: u64) {
        let left = self.rdma.awaited.begin(*process, now_ns() + span, listener);
        self.rdma_leave(left);
    }

    /// It does not come: it is not to be asked for anything.
    pub(super) fn rdma_expects_no_more(&mut self, process: &[u8; 16]) {
        let left = self.rdma.awaited.end(process);
        self.rdma_leave(left);
        self.ask_later.retain(|(p, _)| p != process);
    }

    /// Nobody is awaited at a listener any more: if its connection has ended, it goes.
    pub(super) fn rdma_leave(&mut self, listener: u64) {
        let Some(Place::Listener { end, .. }) = self.rdma.places.get(&listener) else { return };
        if self.looks.get(end).is_none_or(|look| look.attempt != listener) {
            self.rdma_drop(listener);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_kept_until_its_process_has_come() {
        let mut a = Awaited::default();
        assert_eq!(a.due(), i64::MAX);
        assert_eq!(a.begin([1; 16], 10, 7), 0);
        assert_eq!(a.begin([2; 16], 9, 8), 0);
        assert!(a.is_at(7) && a.is_at(8) && a.has(&[1; 16]) && !a.has(&[3; 16]) && a.due() == 9);
        assert_eq!(a.late(9), vec![[2; 16]]);
        // Again at the same one, then answered.
        assert_eq!(a.begin([1; 16], 20, 7), 0);
        assert_eq!(a.begin([1; 16], 20, 0), 7);
        assert!(!a.is_at(7) && a.has(&[1; 16]));
        assert_eq!((a.end(&[1; 16]), a.end(&[2; 16]), a.end(&[2; 16])), (0, 8, 0));
    }
}
