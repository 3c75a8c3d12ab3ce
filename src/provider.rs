//! The table of functions by which the core uses RDMA, and the loading of the
//! library that fills it.
//!
//! `libringsock_verbs.so` is the only part that touches libibverbs and
//! librdmacm. It lies beside this library and is loaded when a connection
//! first has something to gain from it. All that it offers is plain C, so the
//! two need not come from the same compiler; [`VERSION`] says whether they fit.
//!
//! Except for `post`, `post_recv`, `poll`, `arm` and `heard`, and what `direct` gives, which any
//! thread may call, the functions are for one thread: the background thread.

use crate::log::{log, Level};
use core::ffi::{c_char, c_int, c_uint, c_void, CStr};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};

/// Version of [`Api`]: changes whenever anything in this file's types does.
pub const VERSION: u32 = 8;
/// The symbol that gives the table.
pub const SYMBOL: &CStr = c"ringsock_verbs_api";
/// Most bytes of private data in an [`Event`].
pub const PRIVATE: usize = 196;
/// Most bytes that the end that dials can send along.
pub const PRIVATE_DIAL: usize = 56;

/// A write into the peer's memory.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Write {
    /// What to send: its address here.
    pub from: u64,
    /// Where to: its address there.
    pub to: u64,
    /// Key of the memory here (unused with [`INLINE`]).
    pub lkey: u32,
    /// Key of the memory there.
    pub rkey: u32,
    /// Length in bytes, may be 0.
    pub len: u32,
    /// What the receiver's completion carries.
    pub imm: u32,
    /// Comes back in the completion.
    pub id: u64,
    /// [`SIGNALED`], [`INLINE`], [`SOLICITED`], [`UNTOLD`], [`SEND`].
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

/// The write is to give a completion here. As the two that follow, libibverbs' own value.
pub const SIGNALED: u32 = 2;
/// The receiver is to be woken if it sleeps.
pub const SOLICITED: u32 = 4;
/// The bytes are copied when the write is posted.
pub const INLINE: u32 = 8;
/// Only the bytes go: the receiver gets no completion. For measurements.
pub const UNTOLD: u32 = 32;
/// Only `imm` goes, by a send. For measurements.
pub const SEND: u32 = 64;

/// A queue pair as libibverbs has it, and the functions of its device, for what is done for each message: valid until it is
/// closed. Requests and completions are libibverbs' own.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Direct {
    /// The queue pair, and its completion queue.
    pub qp: *mut c_void,
    /// See `qp`.
    pub cq: *mut c_void,
    /// Where the function is told that posts requests. It returns 0 only if all were posted.
    pub post: *const unsafe extern "C" fn(*mut c_void, *mut Request, *mut *mut Request) -> c_int,
    /// Where the function is told that takes completions. It returns their count, or a negative value.
    pub poll: *const unsafe extern "C" fn(*mut c_void, c_int, *mut Completion) -> c_int,
    /// Whether `post` and `poll` are no cancellation points, and only a `post` that fails changes `errno`; what it was then is
    /// put back by `restore`.
    pub quiet: u32,
    /// See `quiet`.
    pub restore: extern "C" fn(),
}

/// `struct ibv_sge`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Piece {
    /// What to send, ...
    pub addr: u64,
    /// ... how much of it, ...
    pub length: u32,
    /// ... and the key of its memory.
    pub lkey: u32,
}

/// `struct ibv_send_wr`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Request {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next one of a list.
    pub next: *mut Request,
    /// What to send.
    pub sg_list: *mut Piece,
    /// How many pieces that is.
    pub num_sge: c_int,
    /// [`WRITE_WITH_IMM`], for example.
    pub opcode: c_uint,
    /// [`SIGNALED`], [`INLINE`], [`SOLICITED`].
    pub send_flags: c_uint,
    /// In the network's order.
    pub imm_data: u32,
    /// Where to.
    pub remote_addr: u64,
    /// The key of the memory there.
    pub rkey: u32,
    /// Of other kinds of requests.
    pub rest: [u64; 9],
}

/// `IBV_WR_RDMA_WRITE_WITH_IMM`.
pub const WRITE_WITH_IMM: c_uint = 1;

/// `struct ibv_wc`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Completion {
    /// Of the write that was posted; 0: of a receive.
    pub wr_id: u64,
    /// 0, or what went wrong.
    pub status: c_uint,
    /// Not after a failure, and so all that follows.
    pub opcode: c_uint,
    /// The device's own.
    pub vendor_err: u32,
    /// How much the peer has written.
    pub byte_len: u32,
    /// In the network's order.
    pub imm_data: u32,
    /// Whose it is.
    pub qp_num: u32,
    /// Of other kinds of queue pairs, as the rest.
    pub src_qp: u32,
    /// See `src_qp`.
    pub wc_flags: c_uint,
    /// See `src_qp`.
    pub rest: [u32; 2],
}

impl Completion {
    /// Whether the peer has written (else: a write of ours is done). Ids of writes are not 0.
    #[inline(always)]
    pub fn is_received(&self) -> bool {
        /// In the opcodes of all kinds of receives.
        const RECEIVE: c_uint = 128;
        if self.status == 0 {
            self.opcode & RECEIVE != 0
        } else {
            self.wr_id == 0
        }
    }
}

const _: () = assert!(size_of::<Request>() == 128 && size_of::<Completion>() == 48 && size_of::<Piece>() == 16);

/// A completion.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Done {
    /// Of the write that was posted.
    pub id: u64,
    /// 0, or libibverbs' status.
    pub status: u32,
    /// Whether the peer has written (else: a write of ours has been done).
    pub received: u32,
    /// How much the peer has written, and what it said with it.
    pub len: u32,
    /// See `len`.
    pub imm: u32,
}

/// Registered memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Memory {
    /// For `forget`.
    pub handle: *mut c_void,
    /// Key for our own writes from it.
    pub lkey: u32,
    /// Key for the peer's writes into it.
    pub rkey: u32,
}

impl Default for Memory {
    fn default() -> Self {
        Memory { handle: core::ptr::null_mut(), lkey: 0, rkey: 0 }
    }
}

/// Where a completion queue that was armed tells of completions.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Channel {
    /// Readable while there is something to hear.
    pub fd: c_int,
    /// For `heard`, until the last queue pair that has it is closed.
    pub handle: *mut c_void,
}

impl Default for Channel {
    fn default() -> Self {
        Channel { fd: -1, handle: core::ptr::null_mut() }
    }
}

/// What a queue pair offers.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Limits {
    /// Writes that may be posted and not done.
    pub writes: u32,
    /// Most bytes of an [`INLINE`] write.
    pub inline: u32,
    /// Whether the device has no hardware behind it: then a write is done by whoever posts it.
    pub software: u32,
}

/// What a connection attempt, a connection or a device has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum What {
    /// Nothing.
    None = 0,
    /// Somebody asks at a listener: `id` is new, `listener` is what `listen` was given.
    Request = 1,
    /// The way to the peer is known: `open` and `connect` may follow.
    Routed = 2,
    /// The queue pair is connected.
    Established = 3,
    /// The peer said no; `private` is what it said, and `status` is 0 where nobody listens.
    Rejected = 4,
    /// There is no way to the peer, no answer, or no device that may be used.
    Unreachable = 5,
    /// The peer is gone, or the device is, or the queue pair has failed.
    Lost = 6,
}

/// See [`What`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Event {
    /// What has happened.
    pub what: What,
    /// For which reason, in the words of librdmacm.
    pub status: i32,
    /// To what: null for a device.
    pub id: *mut c_void,
    /// What `listen`, `dial` or `open` were given for it.
    pub token: u64,
    /// Of a request: the listener's token.
    pub listener: u64,
    /// Of a request: the peer's address, IPv4 mapped.
    pub from: [u8; 16],
    /// Length of what follows.
    pub private_len: u32,
    /// What the peer said.
    pub private: [u8; PRIVATE],
}

impl Default for Event {
    fn default() -> Self {
        Event {
            what: What::None,
            status: 0,
            id: core::ptr::null_mut(),
            token: 0,
            listener: 0,
            from: [0; 16],
            private_len: 0,
            private: [0; PRIVATE],
        }
    }
}

/// How an fd is given up that [`Options::place`] has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Release {
    /// It is about to be closed.
    Closed = 0,
    /// Another file is about to be put under its number, which is not used again.
    Replaced = 1,
    /// It was closed some time ago.
    Gone = 2,
}

/// Settings of the provider.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Options {
    /// The only device to use, NUL-terminated, or an empty text.
    pub device: [c_char; 64],
    /// Whether devices without hardware may be used.
    pub software: u32,
    /// Index of the address (GID) of the device for all connections; -1: the one that they have for TCP.
    pub gid_index: i32,
    /// Gives an fd of the provider's, which any thread may use, a number out of the program's way, and returns it; -1: there is
    /// none, and it is as it was.
    pub place: extern "C" fn(c_int) -> c_int,
    /// An fd that `place` has returned is given up.
    pub release: extern "C" fn(c_int, Release),
    /// The thread's memory for reasons: filled where a function fails, NUL-terminated.
    pub why: [c_char; 128],
}

/// The functions. Those that return `c_int` return 0 or an `errno` value, unless they say otherwise.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Api {
    /// [`VERSION`] of the provider.
    pub version: u32,
    /// Starts; null with `why` filled where that cannot be.
    pub start: unsafe extern "C" fn(*mut Options) -> *mut c_void,
    /// The fd that is readable while there are events.
    pub fd: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// Takes the next event. Returns 1, or 0 where there is none. Never waits.
    pub event: unsafe extern "C" fn(*mut c_void, *mut Event) -> c_int,
    /// Listens at an address (IPv4 mapped) and port. The answer is in the last argument.
    pub listen: unsafe extern "C" fn(*mut c_void, *const [u8; 16], u16, u64, *mut *mut c_void) -> c_int,
    /// The address of this host at which connections with a peer (the first address) are to be made, if a setting says:
    /// 0, and the address is in the last argument.
    pub own: unsafe extern "C" fn(*mut c_void, *const [u8; 16], *mut [u8; 16]) -> c_int,
    /// Begins to look for a way from an address (all zeroes: any) to an address and port; an event says how it ends.
    pub dial: unsafe extern "C" fn(*mut c_void, *const [u8; 16], *const [u8; 16], u16, u64, *mut *mut c_void) -> c_int,
    /// Makes the queue pair of a request or a routed connection: so many writes under way, so many receives.
    pub open: unsafe extern "C" fn(*mut c_void, u32, u32, u64, *mut Limits) -> c_int,
    /// The channel of a queue pair that is open.
    pub channel: unsafe extern "C" fn(*mut c_void, *mut Channel),
    /// The queue pair itself, when it is open.
    pub direct: unsafe extern "C" fn(*mut c_void, *mut Direct),
    /// Takes an event from a channel, never waiting: 1 and the token of the queue pair, or 0.
    pub heard: unsafe extern "C" fn(*mut c_void, *mut u64) -> c_int,
    /// Registers memory for a queue pair that is open. The last but one: whether the peer may write.
    pub register: unsafe extern "C" fn(*mut c_void, *mut u8, usize, c_int, *mut Memory) -> c_int,
    /// Ends a registration.
    pub forget: unsafe extern "C" fn(*mut c_void),
    /// Connects, with private data of at most [`PRIVATE_DIAL`] bytes. Where the connection is not open that is only a
    /// question, to which the peer can answer no; devices may refuse it.
    pub connect: unsafe extern "C" fn(*mut c_void, *const u8, u32) -> c_int,
    /// Answers a request, with private data.
    pub accept: unsafe extern "C" fn(*mut c_void, *const u8, u32) -> c_int,
    /// Refuses a request, with private data. `close` must follow.
    pub reject: unsafe extern "C" fn(*mut c_void, *const u8, u32) -> c_int,
    /// Tells the peer that this is the end.
    pub disconnect: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// Ends a listener, an attempt or a connection. No thread may be using it.
    pub close: unsafe extern "C" fn(*mut c_void),
    /// Posts writes. Returns 0 only if all were posted.
    pub post: unsafe extern "C" fn(*mut c_void, *const Write, u32) -> c_int,
    /// Posts so many receives.
    pub post_recv: unsafe extern "C" fn(*mut c_void, u32) -> c_int,
    /// Takes completions; returns their count, or a negative value.
    pub poll: unsafe extern "C" fn(*mut c_void, *mut Done, c_int) -> c_int,
    /// Asks for an event at the next completion; the last argument: only one that is solicited or failed.
    pub arm: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    /// Finds out by which device and port, and from which address, a peer's address is reached: written as text.
    /// The length is in the last argument.
    pub way: unsafe extern "C" fn(*const [u8; 16], *mut c_char, *mut usize) -> c_int,
    /// Writes a description of devices, ports, addresses and limits, for people. Returns its length.
    pub describe: unsafe extern "C" fn(*mut c_char, usize) -> usize,
}

/// The type of [`SYMBOL`].
pub type Entry = unsafe extern "C" fn() -> *const Api;

static API: AtomicPtr<Api> = AtomicPtr::new(core::ptr::null_mut());
/// 0: not tried, 1: loaded, 2: cannot be loaded.
static STATE: AtomicU32 = AtomicU32::new(0);

/// The provider, loading it first if need be. Only for the background thread, and programs of our own.
pub fn load() -> Option<&'static Api> {
    if STATE.load(Acquire) == 0 {
        let found = crate::desk::kept::host(find);
        if let Err(why) = &found {
            log(Level::Warn, format_args!("no verbs link: {why}"));
        }
        API.store(found.map_or(core::ptr::null_mut(), |p| p.cast_mut()), Relaxed);
        STATE.store(if API.load(Relaxed).is_null() { 2 } else { 1 }, Release);
    }
    // SAFETY: null, or a table that is never unloaded.
    unsafe { API.load(Relaxed).as_ref() }
}

/// In a forked child: libibverbs' state is the parent's, and cannot be used here.
pub fn reset_after_fork() {
    if STATE.load(Relaxed) == 1 {
        STATE.store(2, Relaxed);
        API.store(core::ptr::null_mut(), Relaxed);
    }
}

fn find() -> Result<*const Api, String> {
    // The provider lies beside the object that this code is in.
    // SAFETY: `info` is written by dladdr, whose strings live as long as the object.
    let dir = unsafe {
        let mut info: libc::Dl_info = core::mem::zeroed();
        let here = find as fn() -> Result<*const Api, String> as *const c_void;
        if libc::dladdr(here, &mut info) == 0 || info.dli_fname.is_null() {
            return Err("cannot tell where this library lies".into());
        }
        CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned()
    };
    let path = std::path::Path::new(&dir).with_file_name("libringsock_verbs.so");
    let name = std::ffi::CString::new(path.to_string_lossy().as_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: a NUL-terminated name; the library's initialisers are our own.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(format!("{} cannot be loaded", path.display()));
    }
    // SAFETY: the symbol has the type `Entry` in every version of the provider.
    let api = unsafe {
        let entry = libc::dlsym(handle, SYMBOL.as_ptr());
        if entry.is_null() {
            return Err(format!("{} is something else", path.display()));
        }
        core::mem::transmute::<*mut c_void, Entry>(entry)()
    };
    // SAFETY: the first field is the version in every version.
    match unsafe { (*api).version } {
        VERSION => Ok(api),
        v => Err(format!("{} has version {v} of the interface, not {VERSION}", path.display())),
    }
}
