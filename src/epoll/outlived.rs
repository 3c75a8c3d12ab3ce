//! Sets whose last number is closed, or replaced, while threads wait in them. The kernel's call holds the file, and goes on: it
//! is told of what becomes ready, as before. So the set stays, with a number of the library's own, until the last of such calls
//! has left it. Only where a program has several threads is there anything to hold: a handler that closes the number of the call
//! that it interrupts ends that call.

use super::*;
use crate::{fdhigh, process, sleepers};

impl Set {
    /// Does `call`, which may wait in the set. `None`, and nothing is done: `epfd` is not the set's number any more.
    #[inline]
    pub(super) fn within<R>(&'static self, epfd: c_int, call: impl FnOnce() -> R) -> Option<R> {
        if !process::has_threads() {
            return Some(call());
        }
        let before = sleepers::begin(self.place());
        // Who closes the number sees that the thread is here, or this sees that it is closed.
        let result = table::is_set(epfd, self).then(call);
        self.leave_call(before);
        result
    }

    /// The call is over, or never come back to; a handler's goes back to the one that it has interrupted.
    #[inline]
    pub(super) fn leave_call(&'static self, before: usize) {
        sleepers::end(before);
        if self.unnamed.load(Relaxed) {
            self.left();
        }
    }

    /// `fd`, its last number, has left the table and is about to be closed. Whether calls go on that wait in it.
    pub(super) fn is_outlived(&self, fd: c_int) -> bool {
        if !process::has_threads() || self.is_inherited() {
            return false;
        }
        sleepers::see_all();
        if !sleepers::any_within(self.place()) {
            return false;
        }
        // A forked child knows nothing of it.
        let Ok(own) = fdhigh::not_for_children(|| fdhigh::dup_high(fd)) else { return false };
        self.epfd.store(own, SeqCst);
        self.unnamed.store(true, SeqCst);
        sleepers::see_all();
        // The last may have left before it could see that.
        if !sleepers::any_within(self.place()) && self.unnamed.swap(false, SeqCst) {
            self.epfd.store(fd, SeqCst);
            sys::close(own);
            return false;
        }
        true
    }

    /// A call has left the set when that had no number any more.
    #[cold]
    fn left(&'static self) {
        sleepers::see_all();
        let is_last = !self.is_inherited() && !sleepers::any_within(self.place());
        if is_last && self.unnamed.swap(false, SeqCst) {
            let own = self.epfd.load(SeqCst);
            closed(self);
            sys::close(own);
        }
    }
}
