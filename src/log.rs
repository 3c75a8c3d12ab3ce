//! The log: one short line on stderr, or in a file, when something needs saying.
//!
//! A line is formatted into a buffer on the stack and written by one system
//! call. Nothing here allocates, takes a lock or touches `errno`, so any hook
//! may log at any point, also in a forked child and in a signal handler.
//!
//! The program owns its fds. It may close stderr and get a socket as fd 2, or
//! close every fd that it does not know. So each line first looks at what the
//! fd is now: a log line must never end up in a program's connection.

use crate::sys::{sys, Errno, SysResult};
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicU8, Ordering::Relaxed};

/// How much a line matters; a smaller number matters more.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing at all is logged at this level.
    Off = 0,
    /// A connection was lost, or the library cannot work.
    Error = 1,
    /// Something is not as the user wanted it.
    Warn = 2,
    /// Upgrades, returns, links.
    Info = 3,
    /// Steps of the rendezvous and of switches.
    Debug = 4,
    /// Everything.
    Trace = 5,
}

impl Level {
    /// The level for its lower-case name.
    pub fn parse(text: &[u8]) -> Option<Level> {
        [Level::Off, Level::Error, Level::Warn, Level::Info, Level::Debug, Level::Trace]
            .into_iter()
            .find(|l| l.name().as_bytes() == text)
    }

    /// The name as it is written in settings and at the head of each line.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Off => "off",
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        }
    }
}

/// Longest line in bytes, with its newline; the rest of a longer one is cut.
pub const LINE_BYTES: usize = 512;

const STDERR: i32 = 2;

static LEVEL: AtomicU8 = AtomicU8::new(Level::Warn as u8);
static FD: AtomicI32 = AtomicI32::new(STDERR);
/// Identity of what `FD` was when it was set up; 0 while unknown.
static DEV: AtomicU64 = AtomicU64::new(0);
static INO: AtomicU64 = AtomicU64::new(0);

/// Whether a line of `level` would be written.
#[inline]
pub fn enabled(level: Level) -> bool {
    level != Level::Off && level as u8 <= LEVEL.load(Relaxed)
}

/// Writes one line, if `level` is enabled.
#[inline]
pub fn log(level: Level, args: fmt::Arguments<'_>) {
    if enabled(level) {
        emit(level, args);
    }
}

/// Writes one line the first time only that `said` is used.
///
/// A line that is not enabled does not use `said` up.
pub fn once(said: &AtomicBool, level: Level, args: fmt::Arguments<'_>) {
    if enabled(level) && !said.swap(true, Relaxed) {
        emit(level, args);
    }
}

/// Logs at level `error`.
#[macro_export]
macro_rules! error { ($($arg:tt)*) => { $crate::log::log($crate::log::Level::Error, format_args!($($arg)*)) }; }
/// Logs at level `warn`.
#[macro_export]
macro_rules! warn { ($($arg:tt)*) => { $crate::log::log($crate::log::Level::Warn, format_args!($($arg)*)) }; }
/// Logs at level `info`.
#[macro_export]
macro_rules! info { ($($arg:tt)*) => { $crate::log::log($crate::log::Level::Info, format_args!($($arg)*)) }; }
/// Logs at level `debug`.
#[macro_export]
macro_rules! debug { ($($arg:tt)*) => { $crate::log::log($crate::log::Level::Debug, format_args!($($arg)*)) }; }
/// Logs at level `trace`.
#[macro_export]
macro_rules! trace { ($($arg:tt)*) => { $crate::log::log($crate::log::Level::Trace, format_args!($($arg)*)) }; }
pub use crate::{debug, error, info, trace, warn};

/// Sets level and target; `path` is NUL-terminated and fully expanded, `None` is stderr.
///
/// If the file cannot be opened the log goes to stderr; the error is returned
/// for the caller to tell.
pub(crate) fn init(level: Level, path: Option<&[u8]>) -> Result<(), Errno> {
    LEVEL.store(level as u8, Relaxed);
    let (fd, result) = match path {
        Some(path) if level != Level::Off => match open(path) {
            Ok(fd) => (fd, Ok(())),
            Err(e) => (STDERR, Err(e)),
        },
        _ => (STDERR, Ok(())),
    };
    if let Ok(st) = fstat(fd) {
        DEV.store(st.st_dev, Relaxed);
        INO.store(st.st_ino, Relaxed);
    }
    let old = FD.swap(fd, Relaxed);
    if old != fd && old > STDERR {
        crate::sys::close(old);
    }
    result
}

/// Opens a log file for appending, at a high fd.
fn open(path: &[u8]) -> SysResult<i32> {
    if path.last() != Some(&0) {
        return Err(libc::EINVAL);
    }
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
    // SAFETY: `path` ends with NUL, as was just seen.
    let fd = unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o644)? };
    Ok(crate::fdhigh::move_high(fd as i32))
}

fn fstat(fd: i32) -> SysResult<libc::stat> {
    let mut st = core::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: `st` has room for what the kernel writes.
    unsafe { sys!(libc::SYS_fstat, fd, st.as_mut_ptr())? };
    // SAFETY: all zeroes is a valid `stat`, and the kernel has filled it.
    Ok(unsafe { st.assume_init() })
}

#[cold]
fn emit(level: Level, args: fmt::Arguments<'_>) {
    let mut line = Line { buf: [0; LINE_BYTES], len: 0 };
    // SAFETY: takes no arguments.
    let pid = unsafe { sys!(libc::SYS_getpid) }.unwrap_or(0);
    let _ = write!(line, "ringsock[{pid}] {}: ", level.name());
    let _ = line.write_fmt(args);
    let text = line.finish();
    let fd = FD.load(Relaxed);
    if let Ok(st) = fstat(fd) {
        let same = st.st_dev == DEV.load(Relaxed) && st.st_ino == INO.load(Relaxed);
        let kind = st.st_mode & libc::S_IFMT;
        // Stderr may be redirected by the program, but a socket counts only if
        // it is a local one (the journal's) that was stderr from the start:
        // under inetd the fd is the client's connection. Another file than then
        // must be one that lines are added to: it may hold the program's data.
        // A log file has an fd that only we know; if it is something else now,
        // the program has closed and reused it.
        let fit = match (fd, kind) {
            (STDERR, libc::S_IFSOCK) => same && is_local_socket(fd),
            (STDERR, libc::S_IFREG) => same || appends(fd),
            (STDERR, _) => true,
            _ => same,
        };
        if fit {
            write_quietly(fd, text, (kind == libc::S_IFREG).then_some(st.st_size as usize));
        }
    }
}

fn appends(fd: i32) -> bool {
    // SAFETY: takes no pointer.
    unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) }.is_ok_and(|flags| flags as i32 & libc::O_APPEND != 0)
}

fn is_local_socket(fd: i32) -> bool {
    let mut domain: i32 = 0;
    let mut len: u32 = 4;
    // SAFETY: `domain` has the four bytes that `len` says.
    let got =
        unsafe { sys!(libc::SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_DOMAIN, &raw mut domain, &raw mut len) };
    got.is_ok() && domain == libc::AF_UNIX
}

/// Writes without waiting for a reader and without a `SIGPIPE` for the program.
/// `size`: of a regular file.
fn write_quietly(fd: i32, text: &[u8], size: Option<usize>) {
    if let Some(size) = size {
        if !crate::shm::may_have(size + text.len()) {
            return;
        }
        // SAFETY: `text` is valid for its length.
        let _ = unsafe { sys!(libc::SYS_write, fd, text.as_ptr(), text.len()) };
        return;
    }
    // A pipe that nobody empties must not stop the program.
    let mut pfd = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one pollfd and a timeout, both valid; no signal mask.
    let ready = unsafe { sys!(libc::SYS_ppoll, &raw mut pfd, 1, &raw const now, 0, 8) };
    if !matches!(ready, Ok(1)) || pfd.revents & libc::POLLOUT == 0 {
        return;
    }
    let pipe_bit: u64 = 1 << (libc::SIGPIPE - 1);
    let (mut pending, mut old) = (0u64, 0u64);
    // SAFETY: kernel signal sets are 8 bytes, as said in the last argument.
    let blocked = unsafe {
        sys!(libc::SYS_rt_sigpending, &raw mut pending, 8).is_ok()
            && sys!(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const pipe_bit, &raw mut old, 8).is_ok()
    };
    if !blocked {
        return;
    }
    // SAFETY: `text` is valid for its length.
    let wrote = unsafe { sys!(libc::SYS_write, fd, text.as_ptr(), text.len()) };
    if wrote == Err(libc::EPIPE) && pending & pipe_bit == 0 {
        // SAFETY: takes the one SIGPIPE that this write has raised; no siginfo wanted.
        let _ = unsafe { sys!(libc::SYS_rt_sigtimedwait, &raw const pipe_bit, 0, &raw const now, 8) };
    }
    // SAFETY: puts back the mask that was read above.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const old, 0, 8) };
}

/// A line on the stack; what does not fit is dropped.
struct Line {
    buf: [u8; LINE_BYTES],
    len: usize,
}

impl Line {
    /// Makes it one line that ends with a newline.
    fn finish(&mut self) -> &[u8] {
        let len = self.len.min(LINE_BYTES - 1);
        let Some(text) = self.buf.get_mut(..=len) else { return b"" };
        for b in text.iter_mut() {
            // Values from outside are quoted in lines; they must not forge lines or drive a terminal.
            if *b < b' ' || *b == 0x7f {
                *b = b' ';
            }
        }
        if let Some(last) = text.last_mut() {
            *last = b'\n';
        }
        text
    }
}

impl Write for Line {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let room = (LINE_BYTES - 1).saturating_sub(self.len);
        let n = s.len().min(room);
        if let (Some(to), Some(from)) = (self.buf.get_mut(self.len..self.len + n), s.as_bytes().get(..n)) {
            to.copy_from_slice(from);
            self.len += n;
        }
        Ok(())
    }
}

/// Bytes from outside, shown as text: quoted, and cut after 80 bytes.
pub(crate) struct Quoted<'a>(pub &'a [u8]);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 80;
        f.write_char('"')?;
        for &b in self.0.iter().take(MOST) {
            match b {
                b'"' | b'\\' => write!(f, "\\{}", b as char)?,
                b' '..=b'~' => f.write_char(b as char)?,
                _ => write!(f, "\\x{b:02x}")?,
            }
        }
        f.write_str(if self.0.len() > MOST { "\"..." } else { "\"" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_by_name() {
        assert_eq!(Level::parse(b"trace"), Some(Level::Trace));
        assert_eq!(Level::parse(b"Warn"), None);
        assert!(Level::Error < Level::Debug);
    }

    #[test]
    fn a_long_line_is_cut_and_ends_with_a_newline() {
        let mut line = Line { buf: [0; LINE_BYTES], len: 0 };
        for _ in 0..100 {
            let _ = write!(line, "0123456789");
        }
        let text = line.finish();
        assert_eq!(text.len(), LINE_BYTES);
        assert_eq!(text.last(), Some(&b'\n'));
        assert!(!text[..LINE_BYTES - 1].contains(&0));
    }

    #[test]
    fn control_characters_cannot_forge_a_line() {
        let mut line = Line { buf: [0; LINE_BYTES], len: 0 };
        let _ = write!(line, "a\nb\x1b[0m");
        assert_eq!(line.finish(), b"a b [0m\n");
    }

    #[test]
    fn quoting() {
        assert_eq!(Quoted(b"a\"\xff").to_string(), r#""a\"\xff""#);
        assert!(Quoted(&[b'x'; 200]).to_string().ends_with("\"..."));
    }

    fn pipe() -> [i32; 2] {
        let mut fds = [0i32; 2];
        // SAFETY: room for two fds.
        unsafe { sys!(libc::SYS_pipe2, fds.as_mut_ptr(), libc::O_CLOEXEC) }.unwrap();
        fds
    }

    #[test]
    fn a_full_pipe_is_not_waited_for() {
        let [read, write] = pipe();
        // SAFETY: plain fcntl and write on our own pipe.
        unsafe {
            sys!(libc::SYS_fcntl, write, libc::F_SETFL, libc::O_NONBLOCK).unwrap();
            while sys!(libc::SYS_write, write, [0u8; 4096].as_ptr(), 4096).is_ok() {}
            sys!(libc::SYS_fcntl, write, libc::F_SETFL, 0).unwrap();
        }
        write_quietly(write, b"x\n", None);
        crate::sys::close_raw(read);
        crate::sys::close_raw(write);
    }

    #[test]
    fn a_closed_pipe_does_not_kill() {
        let [read, write] = pipe();
        crate::sys::close_raw(read);
        // In a child, because the disposition of a signal belongs to the whole test process.
        // SAFETY: the child makes system calls only, until it exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the default disposition, and an end without exit handlers.
            unsafe {
                libc::signal(libc::SIGPIPE, libc::SIG_DFL);
                write_quietly(write, b"x\n", None);
                libc::_exit(7);
            }
        }
        let mut status = 0;
        // SAFETY: our own child, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        crate::sys::close_raw(write);
        assert_eq!(status, 7 << 8, "not killed by SIGPIPE");
    }
}
