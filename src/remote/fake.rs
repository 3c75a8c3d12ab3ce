//! For tests: a device that takes all writes and does none before it is told to.

use super::*;
use crate::provider::{self, Completion, Done, Event, Options, SIGNALED};
use core::ffi::{c_char, c_int};
use std::cell::RefCell;
use std::collections::VecDeque;

/// A write that the device has, as it was posted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub id: u64,
    pub from: u64,
    pub to: u64,
    pub len: u32,
    pub imm: u32,
    pub flags: u32,
    /// It came the short way.
    pub short: bool,
}

impl Sent {
    /// Whether the device is to tell when it is done.
    pub fn tells(&self) -> bool {
        self.flags & SIGNALED != 0
    }
}

thread_local! {
    /// Writes under way, and completions that nobody has taken yet, of this thread's test.
    static SENT: RefCell<VecDeque<Sent>> = const { RefCell::new(VecDeque::new()) };
    static DONE: RefCell<VecDeque<u64>> = const { RefCell::new(VecDeque::new()) };
}

/// Lets the device do its first write, if there is one.
pub(super) fn does() -> Option<Sent> {
    let sent = SENT.with_borrow_mut(VecDeque::pop_front)?;
    if sent.tells() {
        DONE.with_borrow_mut(|done| done.push_back(sent.id));
    }
    Some(sent)
}

/// Whether the device tells of a write that is under way or done.
pub(super) fn will_tell() -> bool {
    SENT.with_borrow(|sent| sent.iter().any(Sent::tells)) || DONE.with_borrow(|done| !done.is_empty())
}

/// The device.
pub(super) static DEVICE: Api = {
    unsafe extern "C" fn start(_: *mut Options) -> *mut c_void {
        core::ptr::null_mut()
    }
    unsafe extern "C" fn number(_: *mut c_void) -> c_int {
        0
    }
    unsafe extern "C" fn event(_: *mut c_void, _: *mut Event) -> c_int {
        0
    }
    unsafe extern "C" fn listen(_: *mut c_void, _: *const [u8; 16], _: u16, _: u64, _: *mut *mut c_void) -> c_int {
        0
    }
    unsafe extern "C" fn own(_: *mut c_void, _: *const [u8; 16], _: *mut [u8; 16]) -> c_int {
        0
    }
    unsafe extern "C" fn dial(
        _: *mut c_void,
        _: *const [u8; 16],
        _: *const [u8; 16],
        _: u16,
        _: u64,
        _: *mut *mut c_void,
    ) -> c_int {
        0
    }
    unsafe extern "C" fn open(_: *mut c_void, writes: u32, _: u32, _: u64, to: *mut Limits) -> c_int {
        // SAFETY: the caller's structure.
        unsafe { to.write(Limits { writes, inline: 100, software: 0 }) };
        0
    }
    unsafe extern "C" fn channel(_: *mut c_void, _: *mut Channel) {}
    unsafe extern "C" fn send(_: *mut c_void, request: *mut Request, _: *mut *mut Request) -> c_int {
        // SAFETY: the caller's structures.
        let (r, piece) = unsafe { (&*request, &*(*request).sg_list) };
        assert!(r.next.is_null() && r.num_sge == 1 && r.opcode == provider::WRITE_WITH_IMM);
        let (from, to, imm) = (piece.addr, r.remote_addr, u32::from_be(r.imm_data));
        let sent = Sent { id: r.wr_id, from, to, len: piece.length, imm, flags: r.send_flags, short: true };
        SENT.with_borrow_mut(|all| all.push_back(sent));
        0
    }
    unsafe extern "C" fn take(_: *mut c_void, most: c_int, to: *mut Completion) -> c_int {
        DONE.with_borrow_mut(|done| {
            let n = done.len().min(most as usize);
            for (i, id) in done.drain(..n).enumerate() {
                let c = Completion { wr_id: id, opcode: provider::WRITE_WITH_IMM, ..Completion::default() };
                // SAFETY: the caller's array.
                unsafe { to.add(i).write(c) };
            }
            n as c_int
        })
    }
    unsafe extern "C" fn direct(_: *mut c_void, to: *mut Direct) {
        extern "C" fn restore() {}
        static SEND: unsafe extern "C" fn(*mut c_void, *mut Request, *mut *mut Request) -> c_int = send;
        static TAKE: unsafe extern "C" fn(*mut c_void, c_int, *mut Completion) -> c_int = take;
        let none = core::ptr::null_mut();
        // SAFETY: the caller's structure.
        unsafe { to.write(Direct { qp: none, cq: none, post: &SEND, poll: &TAKE, quiet: 1, restore }) };
    }
    unsafe extern "C" fn heard(_: *mut c_void, _: *mut u64) -> c_int {
        0
    }
    unsafe extern "C" fn register(_: *mut c_void, _: *mut u8, _: usize, _: c_int, _: *mut Memory) -> c_int {
        0
    }
    unsafe extern "C" fn done(_: *mut c_void) {}
    unsafe extern "C" fn say(_: *mut c_void, _: *const u8, _: u32) -> c_int {
        0
    }
    unsafe extern "C" fn post(_: *mut c_void, writes: *const Write, n: u32) -> c_int {
        // SAFETY: the caller's array.
        for w in unsafe { core::slice::from_raw_parts(writes, n as usize) } {
            let sent = Sent { id: w.id, from: w.from, to: w.to, len: w.len, imm: w.imm, flags: w.flags, short: false };
            SENT.with_borrow_mut(|all| all.push_back(sent));
        }
        0
    }
    unsafe extern "C" fn post_recv(_: *mut c_void, _: u32) -> c_int {
        0
    }
    unsafe extern "C" fn poll(_: *mut c_void, _: *mut Done, _: c_int) -> c_int {
        0
    }
    unsafe extern "C" fn arm(_: *mut c_void, _: c_int) -> c_int {
        0
    }
    unsafe extern "C" fn way(_: *const [u8; 16], _: *mut c_char, _: *mut usize) -> c_int {
        0
    }
    unsafe extern "C" fn describe(_: *mut c_char, _: usize) -> usize {
        0
    }
    Api {
        version: provider::VERSION,
        start,
        fd: number,
        event,
        listen,
        own,
        dial,
        open,
        channel,
        direct,
        heard,
        register,
        forget: done,
        connect: say,
        accept: say,
        reject: say,
        disconnect: number,
        close: done,
        post,
        post_recv,
        poll,
        arm,
        way,
        describe,
    }
};

static ID: u8 = 0;

/// A link's half by that device, which has nothing under way.
pub(super) fn half() -> Half {
    SENT.take();
    DONE.take();
    // SAFETY: the device above uses no memory of the id's.
    let half = unsafe { Half::new(&DEVICE, (&raw const ID).cast_mut().cast(), 1) }.expect("memory");
    half.set_peer(0, [1, 1]);
    half
}
