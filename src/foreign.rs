//! Connections that a program has inherited over `exec`, or taken from another process (see [`got`]).
//!
//! The library in the new image knows none of them, and any of them may be on the rings of the process that
//! started it, now or later. It leaves them alone until they are used. Then it asks its ancestors: each
//! process that has a background thread listens at a name made of its id. The one that has the connection
//! brings it home, upgrades it no more while we live, and says so; until then it says that it is at it.
//! An ancestor that has no such thread yet may have one later: before it upgrades a connection it looks for
//! a sign that an image puts up which has asked for it and found nobody.

use crate::conn::{Conn, Phase, END_EOF};
use crate::fdhigh::Room;
use crate::log::{log, Level};
use crate::rendezvous as rv;
use crate::stats::Why;
use crate::sync::{give_way, now_ns};
use crate::sys::{self, sys};
use crate::{arena, numbers, pump, streams, table};
use core::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::*};
use libc::{c_char, c_int, socklen_t};

mod ask;
mod got;
use ask::{ask, Answer, PATIENCE};
pub use ask::{FOR_GOOD, HOME, WAIT, WAIT_NS};
pub use got::got;

/// Owner of such a record: no process (`process::life` is odd).
pub const FOREIGN: u32 = 2;
const WHILE_WE_LIVE: u64 = 0;
/// How far up a process is looked for.
const GENERATIONS: u32 = 8;

/// What tells a socket from all others of this host.
pub fn cookie(fd: c_int) -> Option<u64> {
    let mut v = 0u64;
    let mut len = 8 as socklen_t;
    // SAFETY: `v` and `len` are writable.
    unsafe { sys!(libc::SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_COOKIE, &mut v, &mut len) }.ok()?;
    Some(v)
}

/// The library is loaded: notes the connections that are there already.
pub fn init() {
    each_fd(|fd| {
        if !is_tcp(fd) || !rv::is_or_was_one(fd) {
            return;
        }
        let same = (0..fd).filter_map(table::conn).find(|c| cookie(c.local().fd.load(Relaxed)) == cookie(fd));
        if let Some(c) = same {
            c.local().fds.fetch_add(1, SeqCst);
            table::put_conn(fd, c);
            return;
        }
        note(fd, 0);
    });
    // Standard input, output and error stdio uses unseen: a parent that has called `vfork` or `posix_spawn` did not know
    // of them.
    for c in streams::STANDARD.filter_map(table::conn).filter(|c| c.phase() == Phase::Raw) {
        fetch(c);
    }
}

/// A record for the connection `fd`, of which this process knows nothing: taken from process `from`; 0: inherited.
fn note(fd: c_int, from: u32) -> Option<&'static Conn> {
    let c = arena::alloc_for(FOREIGN)?;
    c.local().fd.store(fd, Relaxed);
    c.local().fds.store(1, Relaxed);
    c.local().taken_from.store(from, Relaxed);
    c.next_try.store(u32::MAX, Relaxed);
    c.why(if from == 0 { Why::Forked } else { Why::Shared });
    // Until it is used it is nobody's business.
    c.stats().gen.fetch_and(!1, Relaxed);
    c.set_phase(Phase::Raw);
    if !table::put_conn(fd, c) {
        c.set_phase(Phase::Closed);
        arena::forget(c);
        return None;
    }
    Some(c)
}

fn is_tcp(fd: c_int) -> bool {
    sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
}

/// Calls `f` for every fd that is open.
fn each_fd(mut f: impl FnMut(c_int)) {
    let not_the_list = |dir, fd| {
        if fd != dir {
            f(fd)
        }
    };
    if numbers::each_in(c"/proc/self/fd", not_the_list).is_err() {
        (0..256).for_each(f);
    }
}

/// Before such a connection is used: whoever has it on its rings brings it home.
#[cold]
pub fn fetch(c: &Conn) {
    if c.visited.swap(true, SeqCst) && is_fetched_soon(c) {
        return;
    }
    c.stats().gen.fetch_or(1, Relaxed);
    let fd = c.local().fd.load(Relaxed);
    // An ancestor that does not listen yet may have it moved as soon as it does. It looks for the sign first.
    put_up_sign(c, fd);
    match ask_owners(c, fd, WHILE_WE_LIVE) {
        Answer::Home => take_down_sign(c),
        Answer::Lost => {
            // What is in its stream may be frames.
            log(Level::Warn, format_args!("nobody brings an inherited connection home, and it is reset"));
            pump::disconnect(c);
        }
        Answer::Nothing => {}
    }
    if c.phase() == Phase::Raw {
        stays(c, fd);
    }
}

/// It is TCP for as long as this process has it.
fn stays(c: &Conn, fd: c_int) {
    // What went through it before is for others to report.
    if let Ok(counts) = crate::rendezvous::kernel_counts(fd, c.connector.load(Relaxed)) {
        c.set_tcp_counts(counts);
    }
    c.set_phase(Phase::Plain);
}

/// Before it is passed to others, of whom its ancestors know nothing: whoever had it on its rings moves it never again.
pub fn hand_on(c: &Conn) {
    if c.came_by_exec() {
        ask_owners(c, c.local().fd.load(Relaxed), FOR_GOOD);
    }
}

/// Whoever may have `c` on its rings.
fn ask_owners(c: &Conn, fd: c_int, how_long: u64) -> Answer {
    match c.local().taken_from.load(Relaxed) {
        0 => ask_ancestors(fd, how_long, true),
        // (Ours do not know it.)
        pid => ask_from(pid, fd, FOR_GOOD, true),
    }
}

/// How many images at a time can say that they use one socket.
const SIGNS: u32 = 4;

fn signs_of(cookie: u64) -> impl Iterator<Item = rv::Name> {
    (0..SIGNS).map(move |n| rv::name(format_args!("ringsock/used-{cookie}-{n}")))
}

/// Says, as long as the connection is open here, that an image uses it that nobody has been asked for.
fn put_up_sign(c: &Conn, fd: c_int) {
    let Some(cookie) = cookie(fd) else { return };
    if crate::process::is_guest() {
        // The number would be one of another process, whose memory this is.
        return;
    }
    let _room = Room::make();
    for name in signs_of(cookie) {
        match rv::stand_at(&name) {
            Err(libc::EADDRINUSE) => {}
            Ok(sign) if c.local().sign.compare_exchange(0, sign, SeqCst, Relaxed).is_ok() => return,
            // Another thread has put one up.
            Ok(sign) => return sys::close(sign),
            Err(_) => return,
        }
    }
}

/// The connection is used here no more, or its owner knows that it is.
pub fn take_down_sign(c: &Conn) {
    let fd = c.local().sign.swap(0, SeqCst);
    if fd > 0 {
        sys::close(fd);
    }
}

/// Whether an image uses the socket with that cookie that has found nobody to ask for it.
pub fn is_signed(cookie: u64) -> bool {
    rv::is_stood_at(signs_of(cookie))
}

/// Whether a process is an image without the library, which asks nobody for what it uses. One that may not be looked at counts
/// as none.
pub fn is_stranger(pid: u32) -> bool {
    const NAME: &[u8] = b"ringsock";
    let mut path = [0u8; 32];
    let _ = core::fmt::Write::write_fmt(&mut Text(&mut path, 0), format_args!("/proc/{pid}/maps\0"));
    let mut buf = [0u8; 4096];
    // The last bytes of what was read before stand at the beginning.
    let mut kept = 0;
    // SAFETY: the path ends with a NUL.
    let Ok(fd) = (unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) })
    else {
        return false;
    };
    let mut any = false;
    let found = loop {
        // SAFETY: the rest of `buf` is writable.
        let n = match unsafe { sys!(libc::SYS_read, fd, buf[kept..].as_mut_ptr(), buf.len() - kept) } {
            Ok(n @ 1..) => kept + n,
            _ => break false,
        };
        any = true;
        if buf[..n].windows(NAME.len()).any(|w| w == NAME) {
            break true;
        }
        kept = n.min(NAME.len() - 1);
        buf.copy_within(n - kept..n, 0);
    };
    sys::close_raw(fd as c_int);
    any && !found
}

/// Another thread, or process, is at it: whether it comes to an end soon. It may have been killed, or wait for its turn below
/// the handler that calls this. (To ask twice does no harm.)
fn is_fetched_soon(c: &Conn) -> bool {
    const SOON_NS: i64 = 100_000_000;
    let until = now_ns() + SOON_NS;
    let mut tries = 0;
    while c.phase() == Phase::Raw {
        if now_ns() >= until {
            return false;
        }
        give_way(&mut tries);
    }
    true
}

/// Has the connection `fd` brought home by whichever ancestor has it on its rings, and kept there while we live, or
/// [`FOR_GOOD`].
fn ask_ancestors(fd: c_int, how_long: u64, patient: bool) -> Answer {
    // SAFETY: no preconditions.
    let parent = unsafe { sys!(libc::SYS_getppid) }.unwrap_or(0) as u32;
    ask_from(parent, fd, how_long, patient)
}

/// The same of process `pid`, or one of its ancestors.
fn ask_from(mut pid: u32, fd: c_int, how_long: u64, patient: bool) -> Answer {
    let Some(cookie) = cookie(fd).map(|c| c | how_long) else { return Answer::Nothing };
    // Who cannot ask cannot know.
    let _room = Room::make();
    for _ in 0..GENERATIONS {
        if pid <= 1 {
            break;
        }
        match ask(pid, &home_of(pid), (fd, cookie), patient.then_some(PATIENCE)) {
            Answer::Nothing => pid = parent_of(pid).unwrap_or(0),
            answer => return answer,
        }
    }
    Answer::Nothing
}

/// An image is about to have the connection `fd`. If it `asks` nobody, its owner, who may have no thread yet that could be
/// asked, is not to move it later, as long as that process lives.
fn count_in(fd: c_int, asks: bool) {
    let note = |c: &Conn| {
        if !asks {
            c.visited.store(true, SeqCst);
        }
    };
    if !crate::process::is_guest() {
        // (A forked child is on the list.)
        let cookie = cookie(fd);
        let of_it = |c: &&Conn| self::cookie(c.local().fd.load(Relaxed)) == cookie;
        return (0..=table::highest()).filter_map(table::conn).find(|c| of_it(&&**c)).into_iter().for_each(note);
    }
    // The numbers are those of the process whose memory this is, and may be closed or another file's here.
    let me = sys::pid();
    let lend = |c: &Conn| {
        c.holders.add_once(me);
        note(c);
    };
    let ends = rv::ends(fd);
    let is_it = |c: &Conn| match ends {
        Some(_) => c.stats().ends() == ends,
        // It is over.
        None => c.has_ended(END_EOF),
    };
    match table::conn(fd).filter(|c| is_it(c)) {
        Some(c) => lend(c),
        // In doubt it is one of which nobody knows yet.
        None => (0..=table::highest())
            .filter_map(table::conn)
            .filter(|c| is_it(c) || ends.is_some() && c.stats().ends().is_none())
            .for_each(lend),
    }
}

/// A process in another's memory gives the connection `fd` another number, of which nobody here may take note: so whoever has
/// it on its rings brings it home, where all numbers are alike, and it stays there as long as that process lives.
pub fn renumbered(fd: c_int) {
    if table::highest() < 0 || crate::desk::is_here() || !is_tcp(fd) || !rv::is_or_was_one(fd) {
        return;
    }
    let _room = Room::make();
    count_in(fd, false);
    if ask_ancestors(fd, WHILE_WE_LIVE, true) == Answer::Lost {
        // What is in its stream may be frames.
        pump::disconnect_number(fd);
    }
}

/// Before an image is executed. If it cannot be preloaded what it inherits must be home, and stay there. Where it is, and may
/// ask for what it uses, nobody may take it for closed before it has: a forked child is on the list of those who have it, and
/// one of `vfork` is put there. Changes nothing else in this process, so that such a child may call it.
///
/// # Safety
/// `path` and `envp` are null or as for `execve(2)`.
pub unsafe fn prepare(path: *const c_char, envp: *const *const c_char) {
    if table::highest() < 0 {
        return;
    }
    let _room = Room::make();
    // SAFETY: the caller's promise.
    let asks = unsafe { is_preloaded(path, envp) };
    if asks && !crate::process::is_guest() {
        return;
    }
    each_fd(|fd| {
        // SAFETY: a query.
        let flags = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) }.unwrap_or(1);
        if flags & libc::FD_CLOEXEC as usize == 0 && is_tcp(fd) && rv::is_or_was_one(fd) {
            // In this order: either the owner sees it, or can be asked.
            count_in(fd, asks);
            if !asks && ask_ancestors(fd, WHILE_WE_LIVE, false) == Answer::Nothing {
                // Nobody who can be asked yet. Until the image is there, and can be told by what it is ([`is_stranger`]).
                table::conn(fd).into_iter().for_each(|c| put_up_sign(c, fd));
            }
        }
    });
}

/// Whether the library will be there in a new image, as far as can be told.
///
/// # Safety
/// `path` and `envp` are null or as for `execve(2)`.
pub unsafe fn is_preloaded(path: *const c_char, envp: *const *const c_char) -> bool {
    const KEY: &[u8] = b"LD_PRELOAD=";
    // SAFETY: strings of the program's, the array ends with a null.
    let has = unsafe {
        let mut at = envp;
        loop {
            if at.is_null() || at.read().is_null() {
                break false;
            }
            let s = core::ffi::CStr::from_ptr(at.read()).to_bytes();
            if s.starts_with(KEY) && s.windows(8).any(|w| w == b"ringsock") {
                break true;
            }
            at = at.add(1);
        }
    };
    // SAFETY: a string of the program's.
    has && unsafe { is_dynamic(path) }
}

/// The path of a program that is searched for as `execvp(3)` does; null if there is none.
///
/// # Safety
/// `file` is null or a string.
pub unsafe fn search(file: *const c_char, place: &mut [u8; libc::PATH_MAX as usize]) -> *const c_char {
    if file.is_null() {
        return file;
    }
    // SAFETY: the caller's promise; what `getenv` returns is a string or null.
    let (name, dirs) = unsafe {
        let dirs = libc::getenv(c"PATH".as_ptr());
        let dirs = if dirs.is_null() { c"/bin:/usr/bin".as_ptr() } else { dirs };
        (core::ffi::CStr::from_ptr(file).to_bytes(), core::ffi::CStr::from_ptr(dirs).to_bytes())
    };
    if name.is_empty() || name.contains(&b'/') {
        return file;
    }
    for dir in dirs.split(|b| *b == b':') {
        let dir = if dir.is_empty() { b"." } else { dir };
        let Some(to) = place.get_mut(..dir.len() + name.len() + 2) else { continue };
        to[..dir.len()].copy_from_slice(dir);
        to[dir.len()] = b'/';
        to[dir.len() + 1..][..name.len()].copy_from_slice(name);
        to[dir.len() + 1 + name.len()] = 0;
        // SAFETY: it ends with a NUL.
        if unsafe { sys!(libc::SYS_faccessat, libc::AT_FDCWD, to.as_ptr(), libc::X_OK) }.is_ok() {
            return to.as_ptr().cast();
        }
    }
    core::ptr::null()
}

const GIVEN_WORDS: usize = 1024;
/// Numbers that file actions of `posix_spawn` have named, for whatever child: one bit each. (Those above count as named.)
static GIVEN: [AtomicU64; GIVEN_WORDS] = [const { AtomicU64::new(0) }; GIVEN_WORDS];

/// What file actions have named a number, by their address; 0: none. The latest ones.
struct Action {
    acts: AtomicUsize,
    fd: AtomicI32,
}

static ACTIONS: [Action; 64] = [const { Action { acts: AtomicUsize::new(0), fd: AtomicI32::new(-1) } }; 64];
static NEXT_ACTION: AtomicUsize = AtomicUsize::new(0);

/// File actions at that address are new.
pub fn new_actions(acts: usize) {
    for a in &ACTIONS {
        let _ = a.acts.compare_exchange(acts, 0, Relaxed, Relaxed);
    }
}

/// A child that is spawned with `acts` gets `fd` under another number.
pub fn give(acts: usize, fd: c_int) {
    if let Some(word) = usize::try_from(fd).ok().and_then(|n| GIVEN.get(n / 64)) {
        word.fetch_or(1 << (fd % 64), Relaxed);
    }
    let a = &ACTIONS[NEXT_ACTION.fetch_add(1, Relaxed) % ACTIONS.len()];
    a.acts.store(0, Relaxed);
    a.fd.store(fd, Relaxed);
    a.acts.store(acts, Release);
}

/// Whether a child may have got the connection so.
pub fn is_given(c: &Conn) -> bool {
    any_number(c, |fd| match usize::try_from(fd).ok().map(|n| (GIVEN.get(n / 64), n % 64)) {
        Some((Some(word), bit)) => word.load(Relaxed) & (1 << bit) != 0,
        Some((None, _)) => true,
        None => false,
    })
}

/// Whether `acts` give it, as far as that is remembered.
pub fn is_given_by(acts: usize, c: &Conn) -> bool {
    let gives = |fd: c_int| ACTIONS.iter().any(|a| a.acts.load(Acquire) == acts && a.fd.load(Relaxed) == fd);
    acts != 0 && any_number(c, gives)
}

fn any_number(c: &Conn, is: impl Fn(c_int) -> bool) -> bool {
    if c.local().fds.load(Relaxed) <= 1 {
        return is(c.local().fd.load(Relaxed));
    }
    (0..=table::highest()).any(|fd| table::is(fd, c) && is(fd))
}

/// Whether a program is linked dynamically and runs with our rights. In doubt it is.
unsafe fn is_dynamic(path: *const c_char) -> bool {
    let mut head = [0u8; 1024];
    // SAFETY: all-zero is a valid stat.
    let mut st: libc::stat = unsafe { core::mem::zeroed() };
    // A FIFO would hold an open or a read up, a device may do anything when it is opened; the kernel executes neither.
    let regular = |st: &libc::stat| st.st_mode & libc::S_IFMT == libc::S_IFREG;
    // SAFETY: `path` is a string or null, which the kernel refuses; the buffers are writable.
    let n = unsafe {
        let known = sys!(libc::SYS_newfstatat, libc::AT_FDCWD, path, &mut st, 0);
        if known.is_err() || !regular(&st) {
            return true;
        }
        let how = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
        let Ok(fd) = sys!(libc::SYS_openat, libc::AT_FDCWD, path, how) else {
            return true;
        };
        let n = match sys!(libc::SYS_fstat, fd, &mut st) {
            Ok(_) if regular(&st) => sys!(libc::SYS_read, fd, head.as_mut_ptr(), head.len()).unwrap_or(0),
            _ => 0,
        };
        sys::close_raw(fd as c_int);
        n
    };
    if st.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
        return false;
    }
    if n < 64 || !head.starts_with(b"\x7fELF\x02") {
        // A script: its interpreter will be asked about when it executes something.
        return true;
    }
    // ELF64 header: e_phoff at 32, e_phentsize at 54, e_phnum at 56; p_type is the first word (elf(5)).
    let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]) as usize;
    let first = u64::from_ne_bytes(head[32..40].try_into().unwrap_or_default()) as usize;
    (0..half(56)).any(|i| {
        let at = first.saturating_add(i * half(54));
        let kind = head[..n].get(at..at.saturating_add(4)).and_then(|b| b.try_into().ok());
        kind.is_none_or(|k| u32::from_ne_bytes(k) == libc::PT_INTERP)
    })
}

/// Where a process listens for this.
pub fn home_of(pid: u32) -> rv::Name {
    rv::name(format_args!("ringsock/home-{pid}"))
}

fn parent_of(pid: u32) -> Option<u32> {
    let mut path = [0u8; 32];
    let mut to = Text(&mut path, 0);
    core::fmt::Write::write_fmt(&mut to, format_args!("/proc/{pid}/stat\0")).ok()?;
    let mut text = [0u8; 512];
    // SAFETY: the path ends with a NUL, `text` is writable.
    let n = unsafe {
        let fd = sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC).ok()?;
        let n = sys!(libc::SYS_read, fd, text.as_mut_ptr(), text.len());
        sys::close_raw(fd as c_int);
        n.ok()?
    };
    // The name before it, in parentheses, may hold anything.
    let end = text[..n].iter().rposition(|b| *b == b')')?;
    let field = text[end..n].split(|b| *b == b' ').nth(2)?;
    core::str::from_utf8(field).ok()?.parse().ok()
}

/// Text without an allocator.
pub struct Text<'a>(pub &'a mut [u8], pub usize);

impl core::fmt::Write for Text<'_> {
    fn write_str(&mut self, s: &str) -> core::fmt::Result {
        let to = self.0.get_mut(self.1..self.1 + s.len()).ok_or(core::fmt::Error)?;
        to.copy_from_slice(s.as_bytes());
        self.1 += s.len();
        Ok(())
    }
}
