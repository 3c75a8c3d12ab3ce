//! A tool for tests, to be preloaded in front of `libringsock.so`: connections in most test suites live for a
//! millisecond and end before they have moved. With this, both ends play [`ROUNDS`] round trips of their own before
//! `connect` and `accept` return, so that what the suite does, it does on rings.
//!
//! To be compared with a native run that has it too: the suite sees byte counts, and times, that are not its own.
//!
//! The two ends find each other by their ports, in a table that all processes of a command share: the file that
//! `WARM_TABLE` names. The end that dials waits a little for the other. If that comes later, in the same thread, and
//! nothing has been sent yet, it plays both parts; else the connection stays as it is. That is for programs in which the
//! thread that dials is the one that goes on with the connection. Where any thread may take up what another has dialled, it
//! would send, or take what is played, in the middle of it: `WARM_BOTH=no`.
//!
//! `WARM_ROUNDS=N`: up to `N` round trips, until one goes by no kernel's socket. Between hosts a link takes longer.
//!
//! `WARM_PAIRS=pipes,sockets` makes pipes, and pairs of Unix stream sockets, of TCP.

mod pairs;

use core::ffi::{c_int, c_void, CStr};
use core::mem::{size_of, zeroed};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};
use core::time::Duration;
use libc::{sockaddr, socklen_t};
use std::os::unix::ffi::OsStrExt;

/// More than it takes for a connection to move with any setting, where its ends have a link.
const ROUNDS: usize = 10;
/// Between two rounds: the library's thread needs the processor too.
const REST: Duration = Duration::from_micros(300);
/// How often the end that dials looks for the other, a [`TICK`] apart, and how often that looks for it.
const DIALS: usize = 60;
const LOOKS: usize = 15;
const TICK: Duration = Duration::from_micros(200);

/// What the end that dials says: it waits; it is gone, and the other may play for both. What the other says: both play.
const WAITS: u64 = 1;
const BOTH: u64 = 2;
const GONE: u64 = 3;

/// The byte of a round trip that others follow, and of the last one.
const MORE: u8 = b'w';
const LAST: u8 = b'e';

const CELLS: usize = 1 << 16;

/// What is known of one connection: its ports and one of the states above, and who dialled it, on which fd.
struct Cell {
    state: AtomicU64,
    thread: AtomicI32,
    fd: AtomicI32,
}

static TABLE: AtomicPtr<Cell> = AtomicPtr::new(core::ptr::null_mut());
/// One thread may play both parts.
static MAY_PLAY_BOTH: AtomicBool = AtomicBool::new(true);
/// So many round trips at the most.
static MOST: AtomicUsize = AtomicUsize::new(ROUNDS);

/// A function that comes after this library's own, once it has been looked up.
struct Next(&'static CStr, AtomicUsize);

impl Next {
    fn get(&self) -> usize {
        if self.1.load(Relaxed) == 0 {
            // SAFETY: the name is a C string.
            self.1.store(unsafe { libc::dlsym(libc::RTLD_NEXT, self.0.as_ptr()) } as usize, Relaxed);
        }
        self.1.load(Relaxed)
    }
}

type Connect = unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int;
type Accept = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
type Accept4 = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t, c_int) -> c_int;

static CONNECT: Next = Next(c"connect", AtomicUsize::new(0));
static ACCEPT: Next = Next(c"accept", AtomicUsize::new(0));
static ACCEPT4: Next = Next(c"accept4", AtomicUsize::new(0));

extern "C" fn begin() {
    pairs::begin();
    let Some(path) = std::env::var_os("WARM_TABLE") else { return };
    let Ok(path) = std::ffi::CString::new(path.as_bytes()) else { return };
    MAY_PLAY_BOTH.store(std::env::var_os("WARM_BOTH").is_none_or(|v| v != "no"), Relaxed);
    let most = std::env::var("WARM_ROUNDS").ok().and_then(|n| n.parse().ok());
    MOST.store(most.unwrap_or(ROUNDS).max(ROUNDS), Relaxed);
    let size = CELLS * size_of::<Cell>();
    // SAFETY: plain calls; what is mapped stays for good.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC, 0o666);
        if fd < 0 {
            return;
        }
        if libc::ftruncate(fd, size as i64) == 0 {
            let (rw, none) = (libc::PROT_READ | libc::PROT_WRITE, core::ptr::null_mut());
            let at = libc::mmap(none, size, rw, libc::MAP_SHARED, fd, 0);
            if at != libc::MAP_FAILED {
                TABLE.store(at.cast(), Release);
            }
        }
        libc::close(fd);
    }
}

#[used]
#[link_section = ".init_array"]
static BEGIN: extern "C" fn() = begin;

fn errno() -> c_int {
    // SAFETY: the place is the thread's own.
    unsafe { *libc::__errno_location() }
}

/// With all signals held back, and `errno` as it was: the program has seen nothing yet.
fn unseen(f: impl FnOnce()) {
    let e = errno();
    // SAFETY: signal sets of this function; the old mask comes back.
    unsafe {
        let (mut all, mut old) = (zeroed(), zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        f();
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, core::ptr::null_mut());
        *libc::__errno_location() = e;
    }
}

/// The port of `fd`'s own end, or of the other.
fn port(fd: c_int, call: unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int) -> Option<u16> {
    // SAFETY: an address of this function, and its size; both families have the port at the same place.
    unsafe {
        let mut at: libc::sockaddr_in6 = zeroed();
        let mut n = size_of_val(&at) as socklen_t;
        let got = call(fd, (&raw mut at).cast(), &mut n) == 0;
        let family = c_int::from(at.sin6_family);
        (got && (family == libc::AF_INET || family == libc::AF_INET6)).then_some(u16::from_be(at.sin6_port))
    }
}

/// Says which connection the stream `fd` is: the port of the end that dialled, and the other's.
fn ports(fd: c_int, dialled: bool) -> Option<u64> {
    let (mut kind, mut n) = (0, size_of::<c_int>() as socklen_t);
    // SAFETY: an int and its size.
    let known = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_TYPE, (&raw mut kind).cast(), &mut n) } == 0;
    if !known || kind != libc::SOCK_STREAM {
        return None;
    }
    let (mine, other) = (u64::from(port(fd, libc::getsockname)?), u64::from(port(fd, libc::getpeername)?));
    Some(if dialled { mine << 16 | other } else { other << 16 | mine })
}

fn cell(ports: u64) -> Option<&'static Cell> {
    let table = TABLE.load(Acquire);
    let at = (ports as u32).wrapping_mul(2_654_435_761) as usize >> 16;
    // SAFETY: `begin` has mapped so many cells, for good.
    (!table.is_null()).then(|| unsafe { &*table.add(at) })
}

/// Waits for something to happen on `fd`, a tenth of a second at most.
fn wait(fd: c_int, events: i16) {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one entry.
    unsafe { libc::poll(&mut p, 1, 100) };
}

/// Moves one byte, in either mode of the socket. Returns it; `None` if that cannot be.
fn byte(fd: c_int, events: i16, mut b: u8, call: impl Fn(*mut c_void) -> isize) -> Option<u8> {
    for _ in 0..200 {
        match call((&raw mut b).cast()) {
            1 => return matches!(b, MORE | LAST).then_some(b),
            n if n < 0 && matches!(errno(), libc::EAGAIN | libc::EINTR) => wait(fd, events),
            _ => break,
        }
    }
    None
}

fn send(fd: c_int, b: u8) -> bool {
    // SAFETY: one byte of the caller's.
    byte(fd, libc::POLLOUT, b, |b| unsafe { libc::send(fd, b, 1, libc::MSG_NOSIGNAL) }).is_some()
}

fn receive(fd: c_int) -> Option<u8> {
    // SAFETY: one byte of the caller's.
    byte(fd, libc::POLLIN, 0, |b| unsafe { libc::recv(fd, b, 1, 0) })
}

/// How much the kernel's socket has sent and received. `None`: it does not tell, as before Linux 4.19.
fn by_kernel(fd: c_int) -> Option<[u64; 2]> {
    // `tcpi_bytes_received` and `tcpi_bytes_sent` of struct tcp_info (linux/tcp.h), in words.
    const RECEIVED: usize = 16;
    const SENT: usize = 25;
    let mut info = [0u64; 32];
    let mut n = size_of_val(&info) as socklen_t;
    // SAFETY: `info` has `n` bytes.
    let r = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &mut n) };
    (r == 0 && n as usize > SENT * size_of::<u64>()).then(|| [info[SENT], info[RECEIVED]])
}

/// Plays round trips of `fd` until they go by no kernel's socket; `round` is given the byte of one.
fn lead(fd: c_int, round: impl Fn(u8) -> bool) {
    let most = MOST.load(Relaxed);
    let (mut before, mut moved) = (by_kernel(fd), false);
    for n in 1.. {
        let last = n >= ROUNDS && moved || n >= most;
        if !round(if last { LAST } else { MORE }) || last {
            return;
        }
        std::thread::sleep(REST);
        let now = by_kernel(fd);
        moved = now.is_some() && now == before;
        before = now;
    }
}

/// Plays both parts.
fn play_both(dialled: c_int, accepted: c_int) {
    let over = |from, to, b| send(from, b) && receive(to).is_some();
    lead(dialled, |b| over(dialled, accepted, b) && over(accepted, dialled, b));
}

/// Plays the other part of that.
fn follow(fd: c_int) {
    while let Some(b) = receive(fd).filter(|b| send(fd, *b)) {
        std::thread::sleep(REST);
        if b == LAST {
            break;
        }
    }
}

/// The end `fd` that was just dialled.
fn dialled(fd: c_int) {
    if TABLE.load(Acquire).is_null() {
        return;
    }
    wait(fd, libc::POLLOUT);
    let Some((ports, at)) = ports(fd, true).and_then(|p| Some((p, cell(p)?))) else { return };
    let says = |what| ports << 32 | what;
    // SAFETY: no arguments.
    at.thread.store(unsafe { libc::gettid() }, SeqCst);
    at.fd.store(fd, SeqCst);
    at.state.store(says(WAITS), SeqCst);
    for _ in 0..DIALS {
        std::thread::sleep(TICK);
        if at.state.load(SeqCst) != says(WAITS) {
            break;
        }
    }
    if at.state.compare_exchange(says(WAITS), says(GONE), SeqCst, SeqCst) == Err(says(BOTH)) {
        lead(fd, |b| send(fd, b) && receive(fd).is_some());
    }
}

/// The end `fd` that was just accepted.
fn accepted(fd: c_int) {
    let Some((ports, at)) = ports(fd, false).and_then(|p| Some((p, cell(p)?))) else { return };
    let says = |what| ports << 32 | what;
    for _ in 0..LOOKS {
        match at.state.compare_exchange(says(WAITS), says(BOTH), SeqCst, SeqCst) {
            Ok(_) => return follow(fd),
            Err(s) if s == says(GONE) => break,
            Err(_) => std::thread::sleep(TICK),
        }
    }
    if !MAY_PLAY_BOTH.load(Relaxed) {
        return;
    }
    let other = at.fd.load(SeqCst);
    // SAFETY: no arguments.
    let mine = at.thread.load(SeqCst) == unsafe { libc::gettid() };
    let there = mine && at.state.load(SeqCst) == says(GONE) && self::ports(other, true) == Some(ports);
    if there && untouched(fd) && untouched(other) {
        play_both(other, fd);
    }
}

/// Whether nothing waits to be read at `fd`, an end included.
fn untouched(fd: c_int) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
    // SAFETY: one entry.
    unsafe { libc::poll(&mut p, 1, 0) == 0 }
}

/// `connect(2)`, and the round trips of a connection that it began.
///
/// # Safety
/// As for the call.
#[no_mangle]
pub unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, n: socklen_t) -> c_int {
    // SAFETY: the function of that name; the caller's arguments.
    let r = unsafe { core::mem::transmute::<usize, Connect>(CONNECT.get())(fd, to, n) };
    if r == 0 || errno() == libc::EINPROGRESS {
        unseen(|| dialled(fd));
    }
    r
}

/// `accept(2)`, and the round trips of the connection.
///
/// # Safety
/// As for the call.
#[no_mangle]
pub unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, n: *mut socklen_t) -> c_int {
    // SAFETY: the function of that name; the caller's arguments.
    let r = unsafe { core::mem::transmute::<usize, Accept>(ACCEPT.get())(fd, from, n) };
    if r >= 0 {
        unseen(|| accepted(r));
    }
    r
}

/// `accept4(2)`, and the round trips of the connection.
///
/// # Safety
/// As for the call.
#[no_mangle]
pub unsafe extern "C" fn accept4(fd: c_int, from: *mut sockaddr, n: *mut socklen_t, flags: c_int) -> c_int {
    // SAFETY: the function of that name; the caller's arguments.
    let r = unsafe { core::mem::transmute::<usize, Accept4>(ACCEPT4.get())(fd, from, n, flags) };
    if r >= 0 {
        unseen(|| accepted(r));
    }
    r
}
