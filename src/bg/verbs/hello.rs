//! What is said in the private data of requests and answers of `rdma_cm`.

use crate::config;
use crate::provider::{self, Event};

/// What the ends of a queue pair say of themselves before it is made, and while it is.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Hello {
    pub magic: u32,
    pub version: u32,
    pub process: [u8; 16],
    /// Where the sender has the mirror of the receiver's segment, and the keys of its notes and first rings.
    pub mirror: u64,
    pub keys: [u32; 2],
    /// The accepting end's port.
    pub port: u16,
    /// See [`says`].
    pub says: u8,
    pub why: u8,
    /// See [`flag`].
    pub flags: u32,
}

/// An answer that says where else to ask.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Referral {
    pub hello: Hello,
    pub at: [u8; 16],
}

/// See [`Hello::flags`].
pub(super) mod flag {
    /// The link is for one connection only.
    pub const ALONE: u32 = 1;
}

/// What a [`Hello`] means. Whoever dials knocks first, with no queue pair, because most often there is a link already.
pub(super) mod says {
    /// We have a link already, or will have one in a moment: expect an `ASK` on it.
    pub const USE: u8 = 1;
    pub const REFUSE: u8 = 2;
    /// "Is this connection yours?"
    pub const KNOCK: u8 = 3;
    /// "It is: come with a queue pair."
    pub const COME: u8 = 4;
    /// "Ask at this address": see [`super::Referral`].
    pub const AT: u8 = 5;
}

pub(super) const MAGIC: u32 = 0x7273_7601;
const _: () = assert!(size_of::<Hello>() <= provider::PRIVATE_DIAL);
const _: () = assert!(size_of::<Hello>() == 48 && size_of::<Referral>() == 64);

impl Hello {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the structure has no padding.
        unsafe { core::slice::from_raw_parts((self as *const Hello).cast(), size_of::<Hello>()) }
    }

    pub fn is_alone(&self) -> bool {
        self.flags & flag::ALONE != 0 || config::get().strict
    }

    pub fn read(e: &Event) -> Option<Hello> {
        if (e.private_len as usize) < size_of::<Hello>() {
            return None;
        }
        // SAFETY: long enough, and any bytes are valid.
        let h = unsafe { e.private.as_ptr().cast::<Hello>().read_unaligned() };
        (h.magic == MAGIC).then_some(h)
    }
}

impl Referral {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the structure has no padding.
        unsafe { core::slice::from_raw_parts((self as *const Referral).cast(), size_of::<Referral>()) }
    }

    pub fn read(e: &Event) -> Option<[u8; 16]> {
        if (e.private_len as usize) < size_of::<Referral>() {
            return None;
        }
        // SAFETY: long enough, and any bytes are valid.
        Some(unsafe { e.private.as_ptr().cast::<Referral>().read_unaligned() }.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::What;

    fn said(bytes: &[u8]) -> Event {
        let mut e = Event { what: What::Rejected, private_len: bytes.len() as u32, ..Event::default() };
        e.private[..bytes.len()].copy_from_slice(bytes);
        e
    }

    #[test]
    fn what_was_said_is_understood() {
        let hello = Hello { magic: MAGIC, says: says::AT, flags: flag::ALONE, port: 7, ..Hello::default() };
        let e = said(Referral { hello, at: [9; 16] }.bytes());
        let h = Hello::read(&e).expect("a hello");
        assert!(h.is_alone() && h.says == says::AT && h.port == 7);
        assert_eq!(Referral::read(&e), Some([9; 16]));
    }

    #[test]
    fn what_is_short_or_something_else_is_not() {
        let hello = Hello { magic: MAGIC, ..Hello::default() };
        assert!(Hello::read(&said(&hello.bytes()[..47])).is_none());
        assert!(Referral::read(&said(hello.bytes())).is_none());
        assert!(Hello::read(&said(Hello::default().bytes())).is_none());
    }
}
