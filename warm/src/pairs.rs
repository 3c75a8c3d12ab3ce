//! Pipes and pairs of Unix sockets as TCP connections, so that tests of processes, signals and waiting, which know no
//! network, meet rings.
//!
//! A pipe of this kind takes more before it is full, its reader can write, and its writer learns late that nobody reads.
//! Tests that tell fail natively, too, and are not compared.

use super::*;
use std::net::Ipv4Addr;

type Socketpair = unsafe extern "C" fn(c_int, c_int, c_int, *mut c_int) -> c_int;
type Pipe = unsafe extern "C" fn(*mut c_int) -> c_int;
type Pipe2 = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;

static SOCKETPAIR: Next = Next(c"socketpair", AtomicUsize::new(0));
static PIPE: Next = Next(c"pipe", AtomicUsize::new(0));
static PIPE2: Next = Next(c"pipe2", AtomicUsize::new(0));

/// What is made of TCP.
static SOCKETS: AtomicBool = AtomicBool::new(false);
static PIPES: AtomicBool = AtomicBool::new(false);

/// From here on numbers are looked for that no program counts on.
const HIGH: c_int = 700;

/// Takes up the setting.
pub fn begin() {
    let Some(what) = std::env::var_os("WARM_PAIRS") else { return };
    let has = |name: &str| what.as_bytes().split(|b| *b == b',').any(|w| w == name.as_bytes());
    SOCKETS.store(has("sockets"), Relaxed);
    PIPES.store(has("pipes"), Relaxed);
}

/// An fd that is closed where it is not given away.
struct Fd(c_int);

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: an fd of this file's.
        unsafe { libc::close(self.0) };
    }
}

impl Fd {
    fn of(r: c_int) -> Option<Fd> {
        (r >= 0).then_some(Fd(r))
    }

    fn tcp() -> Option<Fd> {
        // SAFETY: a plain call.
        Fd::of(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })
    }

    /// Makes it what the program has asked for, and of which small parts go at once, as in a pipe.
    fn set(&self, flags: c_int) -> bool {
        let (on, size): (c_int, _) = (1, size_of::<c_int>() as socklen_t);
        let (status, own) = (flags & libc::O_NONBLOCK, if flags & libc::O_CLOEXEC != 0 { libc::FD_CLOEXEC } else { 0 });
        // SAFETY: an fd of ours; an int and its size.
        unsafe {
            libc::setsockopt(self.0, libc::IPPROTO_TCP, libc::TCP_NODELAY, (&raw const on).cast(), size) == 0
                && (status == 0 || libc::fcntl(self.0, libc::F_SETFL, libc::O_RDWR | status) == 0)
                && libc::fcntl(self.0, libc::F_SETFD, own) == 0
        }
    }
}

/// Both ends of a new connection, which has moved: the lowest numbers, that of the end that was accepted first.
fn connection(flags: c_int) -> Option<[c_int; 2]> {
    let listener = {
        let low = Fd::tcp()?;
        // SAFETY: an fd of ours.
        Fd::of(unsafe { libc::fcntl(low.0, libc::F_DUPFD_CLOEXEC, HIGH) })?
    };
    let mut at = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be() },
        sin_zero: [0; 8],
    };
    let mut n = size_of_val(&at) as socklen_t;
    // SAFETY: an address of this function, and its size.
    let listens = unsafe {
        libc::bind(listener.0, (&raw const at).cast(), n) == 0
            && libc::listen(listener.0, 1) == 0
            && libc::getsockname(listener.0, (&raw mut at).cast(), &mut n) == 0
    };
    if !listens {
        return None;
    }
    // The end that is accepted is to have the lower number.
    let place = Fd::tcp()?;
    let dialled = Fd::tcp()?;
    // SAFETY: the function of that name; an address of this function, and its size.
    let r = unsafe { core::mem::transmute::<usize, Connect>(CONNECT.get())(dialled.0, (&raw const at).cast(), n) };
    if r != 0 {
        return None;
    }
    drop(place);
    let nowhere = core::ptr::null_mut();
    // SAFETY: the function of that name; nobody asks for the address.
    let accepted = Fd::of(unsafe {
        let accept = core::mem::transmute::<usize, Accept4>(ACCEPT4.get());
        accept(listener.0, nowhere, nowhere.cast(), libc::SOCK_CLOEXEC)
    })?;
    play_both(dialled.0, accepted.0);
    if !accepted.set(flags) || !dialled.set(flags) {
        return None;
    }
    let both = [accepted.0, dialled.0];
    core::mem::forget((accepted, dialled));
    Some(both)
}

/// Whether `to` has got both ends of a connection.
///
/// # Safety
/// `to` is null, or has room for two.
unsafe fn make(to: *mut c_int, flags: c_int) -> bool {
    let mut both = None;
    if !to.is_null() {
        unseen(|| both = connection(flags));
    }
    let Some(both) = both else { return false };
    // SAFETY: there is room for two.
    unsafe { to.cast::<[c_int; 2]>().write(both) };
    true
}

/// `socketpair(2)`; streams may be TCP.
///
/// # Safety
/// As for the call.
#[no_mangle]
pub unsafe extern "C" fn socketpair(family: c_int, kind: c_int, protocol: c_int, to: *mut c_int) -> c_int {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let fits = family == libc::AF_UNIX && kind & !flags == libc::SOCK_STREAM && protocol == 0;
    // SAFETY: the caller's array.
    if fits && SOCKETS.load(Relaxed) && unsafe { make(to, kind & flags) } {
        return 0;
    }
    // SAFETY: the function of that name; the caller's arguments.
    unsafe { core::mem::transmute::<usize, Socketpair>(SOCKETPAIR.get())(family, kind, protocol, to) }
}

/// `pipe(2)`, which may be TCP.
///
/// # Safety
/// As for the call.
#[no_mangle]
pub unsafe extern "C" fn pipe(to: *mut c_int) -> c_int {
    // SAFETY: the caller's array.
    if PIPES.load(Relaxed) && unsafe { make(to, 0) } {
        return 0;
    }
    // SAFETY: the function of that name; the caller's arguments.
    unsafe { core::mem::transmute::<usize, Pipe>(PIPE.get())(to) }
}

/// `pipe2(2)`; pipes of bytes may be TCP.
///
/// # Safety
/// As for the call.
#[no_mangle]
pub unsafe extern "C" fn pipe2(to: *mut c_int, flags: c_int) -> c_int {
    let fits = flags & !(libc::O_NONBLOCK | libc::O_CLOEXEC) == 0;
    // SAFETY: the caller's array.
    if fits && PIPES.load(Relaxed) && unsafe { make(to, flags) } {
        return 0;
    }
    // SAFETY: the function of that name; the caller's arguments.
    unsafe { core::mem::transmute::<usize, Pipe2>(PIPE2.get())(to, flags) }
}
