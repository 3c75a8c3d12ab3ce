//! What children find of a connection's items that its owner had taken out of the kernel's sets.
//!
//! A child knows of a set what its parent knew when it was forked. What the owner tells, changes, or takes out after that the
//! child would do once more, or not find. So whoever gives a connection back to the kernel's sets leaves a note of each item
//! with the connection, which the family shares.

use super::*;

/// A connection is in more sets than this only in odd programs.
const MOST: usize = 3;

/// A set, for all processes that have inherited it: its record, who made that (another may have one at the same address), and
/// which of the record's sets it is.
pub(super) type Name = (usize, u32, u32);

/// An item, as it was given back.
#[derive(Clone, Copy)]
pub(super) struct Note {
    set: Name,
    fd: c_int,
    /// It has been taken out since.
    gone: bool,
    pub events: u32,
    pub data: u64,
    /// A one-shot that has fired.
    pub spent: bool,
    /// What was told of edges.
    pub told: Told,
    /// See [`Item::moved`].
    pub moved: Moved,
    /// The edge of its having been put back was taken.
    pub quiet: bool,
    /// Its owner has closed the set, and knows no more of it: others may use it.
    kept: bool,
}

impl Note {
    pub(super) fn of(set: Name, fd: c_int, i: &Item) -> Note {
        let (events, data, spent, told, moved) = (i.events, i.data, i.spent, i.told, i.moved);
        Note { set, fd, gone: false, events, data, spent, told, moved, quiet: false, kept: false }
    }

    /// Of an item that is there no more.
    fn of_none(set: Name, fd: c_int) -> Note {
        let (told, moved) = (Told::NOTHING, Moved::default());
        Note { set, fd, gone: true, events: 0, data: 0, spent: false, told, moved, quiet: false, kept: false }
    }
}

/// What is said of an item.
pub(super) enum Found {
    /// This.
    Note(Note),
    /// It is in the set no more.
    Gone,
    /// Nothing.
    Unknown,
}

/// The notes of a connection.
#[derive(Clone, Copy)]
pub struct Left {
    notes: [Option<Note>; MOST],
    /// There is one of each item.
    all: bool,
}

impl Left {
    /// Nothing is known.
    pub const NOTHING: Left = Left { notes: [None; MOST], all: false };

    /// What was noted of each item, or would have been, had its set a name. `all`: there is no other.
    pub(super) fn of(notes: impl Iterator<Item = Option<Note>>, all: bool) -> Left {
        let mut left = Left { all, ..Left::NOTHING };
        let mut n = 0;
        for note in notes {
            left.all &= note.is_some() && n < MOST;
            if n < MOST && note.is_some() {
                left.notes[n] = note;
                n += 1;
            }
        }
        left
    }

    /// The same, now. What was left of sets that are closed stays as long as there is room for it, and what was taken out: a child
    /// that was forked before that asks later.
    pub(super) fn renew(&mut self, notes: impl Iterator<Item = Option<Note>>, all: bool) {
        let old = core::mem::replace(self, Left::of(notes, all));
        let mut kept = old.notes.into_iter().filter(|n| n.is_some_and(|n| n.kept || n.gone));
        for place in self.notes.iter_mut().filter(|n| n.is_none()) {
            *place = kept.next().flatten();
        }
    }

    /// There is an item in a set that has no name yet, but may get one.
    pub(super) fn lacks_one(&mut self) {
        self.all = false;
    }

    /// The owner closes the set of the item.
    fn keep(&mut self, note: Note) {
        self.set(note.set, note.fd, Some(Note { kept: true, ..note }));
    }

    /// Of a connection that is away from the kernel's sets: whether its owner has taken an item out since it was asked last. A
    /// child may ask before it comes back, and would put the item into the kernel's set itself.
    pub(super) fn is_taken_out(&mut self, set: Name, fd: c_int, gone: bool) {
        if gone {
            return self.keep(Note::of_none(set, fd));
        }
        for n in self.notes.iter_mut().filter(|n| n.is_some_and(|n| n.set == set && n.fd == fd && n.gone)) {
            *n = None;
        }
    }

    /// The item that a set has under a number is this now, or there is none.
    pub(super) fn set(&mut self, set: Name, fd: c_int, note: Option<Note>) {
        let note = note.unwrap_or(Note::of_none(set, fd));
        let place = self.notes.iter().position(|n| n.is_some_and(|n| n.set == set && n.fd == fd));
        // Of one that is gone nothing need be known where all others are.
        let free = || self.notes.iter().position(|n| n.is_none());
        let gone = || self.notes.iter().position(|n| n.is_some_and(|n| n.gone) && self.all);
        match place.or_else(free).or_else(gone) {
            Some(i) => self.notes[i] = Some(note),
            None => self.all &= note.gone,
        }
    }

    /// What is said of the item that a set has under a number.
    pub(super) fn find(&self, set: Option<Name>, fd: c_int) -> Found {
        let Some(set) = set else { return Found::Unknown };
        match self.notes.iter().flatten().find(|n| n.set == set && n.fd == fd) {
            Some(n) if n.gone => Found::Gone,
            Some(n) => Found::Note(*n),
            None if self.all => Found::Gone,
            None => Found::Unknown,
        }
    }
}

impl Set {
    /// This process closes the set, and others may go on with it.
    pub(super) fn leave_notes(&self) {
        let Some(name) = self.name() else { return };
        let managed: Vec<(&'static Conn, Note)> = {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let items = unsafe { &(*self.inner.get()).items }.iter();
            items.filter(|(_, i)| i.managed).map(|(key, i)| (i.conn, Note::of(name, key.fd, i))).collect()
        };
        // (A handler inside a receive of its own thread cannot wait for that.)
        for (conn, note) in managed.into_iter().filter(|(conn, _)| !conn.rx_lock.held_by_me()) {
            conn.lock_rx().left().keep(note);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(set: usize, fd: c_int) -> Option<Note> {
        Some(Note { events: 1, data: 2, gone: false, ..Note::of_none((set, 7, 1), fd) })
    }

    fn says(left: &Left, set: usize, fd: c_int) -> Option<bool> {
        match left.find(Some((set, 7, 1)), fd) {
            Found::Note(n) => Some((n.fd, n.set) == (fd, (set, 7, 1))),
            Found::Gone => Some(false),
            Found::Unknown => None,
        }
    }

    #[test]
    fn what_is_not_noted_is_gone_only_if_all_is_noted() {
        let left = Left::of([note(1, 5), note(2, 5)].into_iter(), true);
        assert_eq!(says(&left, 1, 5), Some(true));
        assert_eq!(says(&left, 2, 5), Some(true));
        assert_eq!(says(&left, 1, 6), Some(false));
        assert!(matches!(left.find(None, 5), Found::Unknown), "a set without a name");
        for (notes, all) in [(vec![note(1, 5)], false), (vec![note(1, 5), None], true)] {
            let left = Left::of(notes.into_iter(), all);
            assert_eq!(says(&left, 1, 5), Some(true));
            assert_eq!(says(&left, 1, 6), None);
        }
        let mut left = Left::of([note(1, 5)].into_iter(), true);
        left.set((1, 7, 1), 5, None);
        left.set((1, 7, 1), 6, note(1, 6));
        assert_eq!((says(&left, 1, 5), says(&left, 1, 6)), (Some(false), Some(true)));
        left.lacks_one();
        assert_eq!(says(&left, 1, 7), None, "it may be in a set without a name");
        assert_eq!((says(&left, 1, 5), says(&left, 1, 6)), (Some(false), Some(true)));
        left.is_taken_out((1, 7, 1), 6, true);
        assert_eq!(says(&left, 1, 6), Some(false), "before it is given back");
        left.is_taken_out((1, 7, 1), 6, false);
        assert_eq!(says(&left, 1, 6), None, "it was added again");
        left.keep(note(3, 4).unwrap());
        left.renew([note(1, 8)].into_iter(), true);
        assert_eq!((says(&left, 1, 8), says(&left, 1, 6)), (Some(true), Some(false)));
        assert_eq!(says(&left, 3, 4), Some(true), "of a set that was closed");
        left.set((1, 7, 1), 8, None);
        left.renew([].into_iter(), false);
        assert_eq!(says(&left, 1, 8), Some(false), "it was taken out before the connection left once more");
        left.renew((0..MOST as c_int).map(|fd| note(1, fd)), true);
        assert_eq!((says(&left, 1, 0), says(&left, 3, 4)), (Some(true), Some(false)), "no room");
        let many = Left::of((0..MOST as c_int + 1).map(|fd| note(1, fd)), true);
        assert_eq!(says(&many, 1, 0), Some(true));
        assert_eq!(says(&many, 1, MOST as c_int), None, "one too many");
    }
}
