//! Attempts to reach the connecting end's process, by its listener. They may go on when their connection has ended
//! ([`Bg::rdma_let_go`]).

use super::*;

impl Bg {
    /// The next attempt of a search. `invited`: the peer has said that it wants a queue pair.
    pub(super) fn rdma_try(&mut self, end: End, now: i64, invited: bool) {
        let Some(look) = self.looks.get_mut(&end) else { return };
        look.at = now + HANDSHAKE_NS;
        look.dials += 1;
        let sent_to = look.sent_to;
        match self.rdma_dial(end, invited, sent_to) {
            Ok(token) => _ = self.looks.get_mut(&end).map(|look| look.attempt = token),
            Err(0) => self.fail_look(end, Why::NoWay),
            Err(_) => self.rdma_unreachable(end),
        }
    }

    /// Begins an attempt. The error is `errno`, or 0 where none of the addresses that may be used leads there.
    pub(super) fn rdma_dial(&mut self, end: End, invited: bool, sent_to: Option<[u8; 16]>) -> Result<u64, c_int> {
        let Some((api, state)) = self.provider() else { return Err(0) };
        let (t, mut from, mut id) = (end.0, end.0.to, core::ptr::null_mut());
        // SAFETY: a state of the provider's, and valid pointers.
        match kept::host(|| unsafe { (api.own)(state, &t.from, &mut from) }) {
            0 => {}
            libc::ENOENT if sent_to.is_some() => from = [0; 16],
            libc::ENOENT => {}
            _ => return Err(0),
        }
        let token = self.rdma.token();
        let to = sent_to.unwrap_or(t.from);
        // SAFETY: as above.
        let e = kept::host(|| unsafe { (api.dial)(state, &from, &to, t.from_port, token, &mut id) });
        if e != 0 {
            log(Level::Debug, format_args!("RDMA: cannot dial, errno {e}"));
            return Err(e);
        }
        self.rdma.put(token, Place::Dial { id, end, half: None, invited, sent_to, until: now_ns() + DIAL_NS });
        Ok(token)
    }

    /// An attempt has found nobody.
    pub(super) fn rdma_in_vain(&mut self, token: u64) {
        match self.rdma.places.get(&token) {
            Some(Place::Dial { end, .. }) if self.is_attempt(end, token) => {
                let end = *end;
                self.rdma_unreachable(end);
            }
            _ => {}
        }
        self.rdma_drop(token);
    }

    /// Whether it is what the search for this connection does at the moment.
    pub(super) fn is_attempt(&self, end: &End, token: u64) -> bool {
        self.looks.get(end).is_some_and(|look| look.attempt == token)
    }
}
