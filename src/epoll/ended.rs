//! A wait that a handler has ended. The kernel tells of what is ready rather than of that.

use super::wait::Ask;
use super::*;

impl Set {
    /// A handler has ended a sleep, in a call that began when `moves` connections had moved. As in the kernel, what was ready
    /// before is told of instead; it may be that only the background thread was told, or is just about to move it.
    #[cold]
    pub(super) fn interrupted(&self, evs: *mut epoll_event, max: usize, mut moves: u32) -> Result<isize, Errno> {
        const MOST: usize = 8;
        for _ in 0..MOST {
            let now = self.moves();
            let moved = core::mem::replace(&mut moves, now) != now;
            if !moved && self.managed.load(SeqCst) == 0 {
                break;
            }
            let round = self.new_round();
            self.look_at_kernel();
            self.list_some();
            let ask = if moved { Ask::First } else { Ask::No };
            let n = self.complete(evs, 0, max, ask, round, 0);
            let n = self.merge(evs, n, round);
            self.show();
            if n > 0 {
                return Ok(n as isize);
            }
            // One that went back to the kernel's set meanwhile was seen in neither place.
            if self.moves.load(SeqCst) == now {
                break;
            }
        }
        Err(libc::EINTR)
    }

    /// Looks at connections of which nothing was heard, as many as there is time for.
    fn list_some(&self) {
        const MOST: usize = 64;
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *self.inner.get() };
        let some = inner.items.iter_mut().filter(|(_, i)| i.managed && !i.spent && !i.listed).take(MOST);
        for (key, i) in some {
            i.listed = true;
            inner.ready.push_back(*key);
        }
        self.listed.store(inner.ready.len() as u32, SeqCst);
    }
}
