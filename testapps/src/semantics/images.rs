//! Programs that inherit the connection over `exec`, and use it: preloaded like us or not.

use super::cx::{child_must_leave_tcp, untried, Cx, Op, Res, Why};
use super::ends::until;
use super::found::{pair, warm};
use super::procs::{bye, child, reap};
use super::Check;
use crate::start::{become_program, environ};
pub(super) use crate::start::{start, start_with, How};
use crate::{ensure, more, same, sys};
use libc::c_int;
use std::os::fd::RawFd;
use std::ptr::null_mut;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("image-fork", |cx| uses(cx, How::Fork, SHELL)),
    ("image-fork-bare", |cx| uses(cx, How::Fork, BARE)),
    ("image-fork-static", |cx| uses(cx, How::Fork, STATIC)),
    ("image-vfork", |cx| uses(cx, How::Vfork, SHELL)),
    ("image-vfork-static", |cx| uses(cx, How::Vfork, STATIC)),
    ("image-spawn", |cx| uses(cx, How::Spawn, SHELL)),
    ("image-spawn-bare", |cx| uses(cx, How::Spawn, BARE)),
    ("image-spawn-static", |cx| uses(cx, How::Spawn, STATIC)),
    ("image-spawn-static-as-input", as_input),
    ("image-by-name-static", |cx| by_name(cx, false)),
    ("image-spawn-by-name-static", |cx| by_name(cx, true)),
    ("image-no-file", no_file),
    ("image-untouched", untouched),
    ("image-before-anybody-looks", |cx| before_anybody_looks(cx, How::Spawn, READER)),
    ("image-before-anybody-looks-static", |cx| before_anybody_looks(cx, How::Fork, STATIC_READER)),
    ("image-before-anybody-looks-vstatic", |cx| before_anybody_looks(cx, How::Vfork, STATIC_READER)),
    ("image-before-anybody-looks-bare", |cx| before_anybody_looks(cx, How::Fork, BARE_READER)),
    ("image-before-anybody-looks-vbare", |cx| before_anybody_looks(cx, How::Vfork, BARE_READER)),
    ("image-of-what-is-over", |cx| of_what_is_over(cx, How::Fork, READER)),
    ("image-of-what-is-over-vfork", |cx| of_what_is_over(cx, How::Vfork, READER)),
    ("image-of-what-is-over-bare", |cx| of_what_is_over(cx, How::Spawn, BARE_READER)),
    ("image-of-what-is-over-itself", over_itself),
    ("image-that-asks-for-an-error", |cx| asks_for_an_error(cx, How::Fork)),
    ("image-that-asks-for-an-error-spawn", |cx| asks_for_an_error(cx, How::Spawn)),
    ("image-that-does-not-block", |cx| does_not_block(cx, &["/usr/bin/python3", "-c"])),
    ("image-that-does-not-block-bare", |cx| does_not_block(cx, &["/usr/bin/env", "-u", "LD_PRELOAD", "python3", "-c"])),
    ("image-that-passes-it-on", passes_on),
    ("image-of-what-we-have-closed", |cx| closed_behind(cx, How::Fork)),
    ("image-of-what-we-have-closed-vfork", |cx| closed_behind(cx, How::Vfork)),
    ("image-of-what-we-have-closed-spawn", |cx| closed_behind(cx, How::Spawn)),
    ("image-of-what-we-have-sent-ourselves-fork", |cx| sent_ourselves(cx, How::Fork)),
    ("image-of-what-we-have-sent-ourselves-vfork", |cx| sent_ourselves(cx, How::Vfork)),
    ("image-of-what-we-have-sent-ourselves-spawn", |cx| sent_ourselves(cx, How::Spawn)),
    ("image-that-answers-for-us-fork", |cx| answers(cx, How::Fork)),
    ("image-that-answers-for-us-vfork", |cx| answers(cx, How::Vfork)),
    ("image-that-answers-for-us-spawn", |cx| answers(cx, How::Spawn)),
    ("image-outlives-us", outlives),
    ("vfork-child-uses-a-copy", uses_a_copy),
    ("vfork-child-puts-a-file-in-its-place", puts_a_file_there),
    ("image-of-a-stopped-peer", |cx| of_a_stopped_peer(cx, 5_600, ITSELF)),
    ("image-signalled", |cx| of_a_stopped_peer(cx, 1_000, SIGNALLED)),
];

/// The number of the connection in the new image.
pub(super) const NUMBER: RawFd = 57;
const SHELL: &[&str] = &["/bin/bash", "-c", "head -c 1000 <&57; printf 0123456789 >&57"];
/// The environment is changed on the way.
const BARE: &[&str] = &["/usr/bin/env", "-u", "LD_PRELOAD", "bash", "-c", "head -c 1000 <&57; printf 0123456789 >&57"];
/// One that uses it itself, and so asks for it once. What it writes before it is home resets the connection.
const ITSELF: &[&str] =
    &["/bin/bash", "-c", "printf 0123456789 >&57; LC_ALL=C read -r -N 1000 -u 57 x; printf %s \"$x\""];
/// The same with a handler, which runs while it waits.
const SIGNALLED: &[&str] = &[
    "/bin/bash",
    "-c",
    "trap : USR1; (sleep 0.2; kill -USR1 $$) & \
     printf 0123456789 >&57; LC_ALL=C read -r -N 1000 -u 57 x; printf %s \"$x\"",
];
pub(super) const STATIC: &[&str] = &["/bin/busybox", "sh", "-c", "head -c 1000 <&57; printf 0123456789 >&57"];

const READER: &[&str] = &["/bin/bash", "-c", "head -c 1000 <&57"];
const BARE_READER: &[&str] = &["/usr/bin/env", "-u", "LD_PRELOAD", "bash", "-c", "head -c 1000 <&57"];
const LATE_READER: &[&str] = &["/bin/bash", "-c", "sleep 0.1; head -c 1000 <&57"];
const STATIC_READER: &[&str] = &["/bin/busybox", "sh", "-c", "head -c 1000 <&57"];

pub(super) fn read_all(fd: RawFd) -> Result<Vec<u8>, Why> {
    let (mut all, mut b) = (Vec::new(), [0; 4096]);
    loop {
        match sys::read(fd, &mut b)? {
            0 => return Ok(all),
            n => all.extend_from_slice(&b[..n]),
        }
    }
}

/// The peer has closed it, and has answered what came then by a reset, of which we were told: what it sent before is the image's.
fn of_what_is_over(cx: &mut Cx, how: How, words: &[&str]) -> Res {
    sys::dup2(cx.fd, NUMBER)?;
    cx.tell(Op::Send, 1000, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.send(10)?;
    until(cx, libc::POLLHUP)?;
    same!(sys::send(cx.fd, b"x", libc::MSG_NOSIGNAL), Err(libc::EPIPE), "the error is told");
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let pid = start(how, words, wr)?;
    sys::close(wr)?;
    sys::close(NUMBER)?;
    let b = read_all(rd)?;
    same!(b.len(), 1000, "bytes that the program has read");
    cx.take(&b)?;
    same!(sys::waitpid(pid)?, 0, "status of the program");
    Ok(())
}

/// A process whose connection has ended in both directions becomes another program: that cannot send.
fn over_itself(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let pid = child(|| {
        let (a, b) = pair()?;
        warm(a, b, 60)?;
        sys::dup2(b, NUMBER)?;
        sys::close(b)?;
        sys::close(a)?;
        sys::shutdown(NUMBER, libc::SHUT_WR)?;
        sys::dup2(wr, 1)?;
        let words = ["/bin/bash", "-c", "trap '' PIPE; printf x 2>/dev/null >&57 || printf refused"];
        Err(Why(format!("exec: {}", sys::strerror(become_program(&words)))))
    })?;
    sys::close(wr)?;
    same!(read_all(rd)?, b"refused", "what the program says of its send");
    same!(sys::waitpid(pid)?, 0, "its status");
    sys::close(rd)?;
    bye(cx)?;
    Ok(())
}

/// We have shut both directions, and what the peer sends is refused: whoever asks first is told of the reset, once, though it
/// be a program that has not used the connection before.
fn asks_for_an_error(cx: &mut Cx, how: How) -> Res {
    needs("/usr/bin/perl")?;
    const ASKS: &str = "use Socket; open(my $f, '+<&=', 57); <STDIN>;
        print join ' ', map { unpack('i', getsockopt($f, SOL_SOCKET, SO_ERROR)) } 1..2";
    sys::dup2(cx.fd, NUMBER)?;
    let ((rd, wr), (goes, tells)) = (sys::pipe()?, sys::pipe()?);
    for fd in [rd, tells] {
        sys::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    }
    let pid = start_with(how, &["/usr/bin/perl", "-e", ASKS], &[(goes, 0), (wr, 1)])?;
    sys::close(wr)?;
    sys::close(goes)?;
    sys::shutdown(cx.fd, libc::SHUT_RDWR)?;
    cx.tell(Op::Send, 32, 0, 0)?;
    until(cx, libc::POLLHUP)?;
    sys::write_all_fd(tells, b"\n")?;
    let said = read_all(rd)?;
    same!(String::from_utf8_lossy(&said), format!("{} 0", libc::ECONNRESET), "what the program is told");
    same!(sys::waitpid(pid)?, 0, "its status");
    same!(sys::getsockopt_int(cx.fd, libc::SOL_SOCKET, libc::SO_ERROR)?, 0, "what we are told after it");
    for fd in [rd, tells, NUMBER] {
        sys::close(fd)?;
    }
    Ok(())
}

fn needs(program: &str) -> Res {
    if !std::path::Path::new(program).exists() {
        return untried(&format!("no {program}"));
    }
    Ok(())
}

/// A program passes on what it has inherited, and ends. Whoever has it now is none that we know of.
fn passes_on(cx: &mut Cx) -> Res {
    needs("/usr/bin/python3")?;
    const BOX: RawFd = 58;
    let script = format!("import socket; socket.send_fds(socket.socket(fileno={BOX}), [b'x'], [{NUMBER}])");
    let (here, there) = sys::socketpair()?;
    sys::dup2(cx.fd, NUMBER)?;
    sys::dup2(there, BOX)?;
    let pid = start(How::Spawn, &["/usr/bin/python3", "-c", &script], 1)?;
    same!(sys::waitpid(pid)?, 0, "the program");
    let other = more::recv_fd(here)?;
    [NUMBER, BOX, here, there].into_iter().try_for_each(sys::close)?;
    for round in 0..4 {
        cx.warm(100, 4)?;
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        let mut b = [0; 10];
        same!(sys::recv(other, &mut b, libc::MSG_DONTWAIT), Ok(10), "a receive by the other number, round {round}");
        cx.take(&b)?;
    }
    sys::close(other)?;
    cx.warm(4, 0)
}

/// A program, which may not be preloaded, has what we wait for not block, or not for long.
fn does_not_block(cx: &mut Cx, python: &[&str]) -> Res {
    needs("/usr/bin/python3")?;
    const SETS: [&str; 2] = [
        "fcntl.fcntl(57, fcntl.F_SETFL, os.O_RDWR | os.O_NONBLOCK)",
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 0, 50000))",
    ];
    // Without others a call is the kernel's, which knows.
    let other = std::thread::spawn(|| crate::util::pause_ms(1000));
    for (set, moved) in SETS.into_iter().flat_map(|set| [(set, false), (set, true)]) {
        cx.renew()?;
        if moved {
            cx.leave_tcp()?;
        }
        sys::dup2(cx.fd, NUMBER)?;
        let script = format!("import fcntl, os, socket, struct; s = socket.socket(fileno=57); {set}");
        let pid = start(How::Spawn, &[python, &[&*script]].concat(), 1)?;
        same!(sys::waitpid(pid)?, 0, "the program");
        cx.tell(Op::Send, 4, 0, 0)?;
        cx.arrive(4)?;
        let mut b = [0; 10];
        same!(sys::recv(cx.fd, &mut b, libc::MSG_WAITALL), Ok(4), "a receive of more than there is");
        cx.take(&b[..4])?;
        same!(sys::read(cx.fd, &mut b), Err(libc::EAGAIN), "a read of nothing");
        sys::close(NUMBER)?;
        sys::nonblock(cx.fd, false)?;
        sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 0)?;
        cx.warm(20, 2)?;
    }
    ensure!(other.join().is_ok(), "a thread");
    Ok(())
}

/// We close it at once, and what it is to read stands in the ring.
fn closed_behind(cx: &mut Cx, how: How) -> Res {
    for words in [READER, LATE_READER] {
        sys::dup2(cx.fd, NUMBER)?;
        cx.tell(Op::Send, 1000, 0, 0)?;
        let (rd, wr) = sys::pipe()?;
        sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
        let pid = start(how, words, wr)?;
        sys::close(wr)?;
        sys::close(NUMBER)?;
        cx.renew()?;
        let begun = std::time::Instant::now();
        same!(read_all(rd)?.len(), 1000, "bytes that the program read");
        ensure!(begun.elapsed().as_secs() < 5, "it has waited for {:?}", begun.elapsed());
        same!(sys::waitpid(pid)?, 0, "status of the program");
        sys::close(rd)?;
        cx.leave_tcp()?;
    }
    Ok(())
}

/// A process has both ends, gives one to a program, closes it, writes to the other, and is killed.
fn sent_ourselves(cx: &mut Cx, how: How) -> Res {
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let pid = child(|| {
        let (a, b) = pair()?;
        warm(a, b, 60)?;
        sys::fcntl(a, libc::F_SETFD, libc::FD_CLOEXEC)?;
        start_with(how, &["/bin/cat"], &[(b, 0), (wr, 1)])?;
        sys::close(b)?;
        sys::write_all(a, b"0123456789")?;
        sys::kill(std::process::id() as libc::pid_t, libc::SIGKILL)?;
        Ok(())
    })?;
    sys::close(wr)?;
    same!(read_all(rd)?, b"0123456789", "what the program has read");
    ensure!(sys::waitpid(pid)? != 0, "it was killed");
    sys::close(rd)?;
    bye(cx)?;
    Ok(())
}

/// Runs `f` in a child of vfork, and gives its status.
///
/// # Safety
/// `f` makes calls that such a child may make, and no others.
unsafe fn vforked(f: impl FnOnce() -> bool) -> Result<c_int, Why> {
    // SAFETY: the caller's promise; the child does not come back.
    let pid = unsafe {
        #[allow(deprecated)]
        match libc::vfork() {
            0 => libc::_exit(!f() as c_int),
            pid => pid,
        }
    };
    ensure!(pid > 0, "vfork");
    Ok(sys::waitpid(pid)?)
}

/// It gives the connection another number, of which nobody can take note in the memory that it shares.
fn uses_a_copy(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 1000, 0, 0)?;
    let mut first = [0u8; 4];
    let (fd, to) = (cx.fd, first.as_mut_ptr());
    // SAFETY: plain calls; the buffer is this function's.
    let status = unsafe {
        vforked(|| {
            let copied = libc::dup2(fd, NUMBER) == NUMBER;
            copied
                && libc::write(NUMBER, c"0123456789".as_ptr().cast(), 10) == 10
                && libc::read(NUMBER, to.cast(), 4) == 4
        })
    }?;
    same!(status, 0, "status of the child");
    cx.take(&first)?;
    cx.recv(996)?;
    cx.post(Op::Recv, 10, 0, 0)?;
    same!(cx.answer()?, Err(9999), "what the peer makes of the child's bytes");
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.recv(5000)?;
    bye(cx)?;
    Ok(())
}

/// The connection's number is another file's there.
fn puts_a_file_there(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let fd = cx.fd;
    // SAFETY: plain calls.
    let status =
        unsafe { vforked(|| libc::dup2(wr, fd) == fd && libc::write(fd, c"0123456789".as_ptr().cast(), 10) == 10) }?;
    same!(status, 0, "status of the child");
    sys::close(wr)?;
    same!(read_all(rd)?, b"0123456789", "what has come through the pipe");
    sys::close(rd)?;
    cx.send(1000)?;
    same!(cx.tell(Op::Recv, 1000, 0, 0)?, 1000, "bytes that arrived");
    bye(cx)?;
    Ok(())
}

/// It gets the connection as its standard input and output, nobody else keeps it, and the peer reads what it says and then
/// the end.
fn answers(cx: &mut Cx, how: How) -> Res {
    sys::fcntl(cx.fd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    cx.tell(Op::Send, 1000, 0, 0)?;
    let words = &["/bin/bash", "-c", "head -c 1000 >/dev/null; head -c 4 >/dev/null; printf 0123456789"];
    let pid = start_with(how, words, &[(cx.fd, 0), (cx.fd, 1)])?;
    let standin = sys::dup(2)?;
    sys::close(std::mem::replace(&mut cx.fd, standin))?;
    // It waits for these, so the peer finds out what it has before the end.
    cx.tell(Op::Send, 4, 0, 0)?;
    cx.post(Op::Recv, 10, 0, 0)?;
    same!(cx.answer()?, Err(9999), "what the peer makes of the program's bytes");
    same!(cx.tell(Op::Recv, 1, 0, 0)?, 0, "what the peer reads then");
    same!(sys::waitpid(pid)?, 0, "status of the program");
    cx.renew()
}

fn uses(cx: &mut Cx, how: How, words: &[&str]) -> Res {
    if !std::path::Path::new(words[0]).exists() {
        return untried(&format!("no {}", words[0]));
    }
    sys::dup2(cx.fd, NUMBER)?;
    cx.tell(Op::Send, 1000, 0, 0)?;
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let pid = start(how, words, wr)?;
    sys::close(wr)?;
    let b = read_all(rd)?;
    same!(sys::waitpid(pid)?, 0, "status of the program");
    same!(b.len(), 1000, "bytes that the program read");
    cx.take(&b)?;
    // What it wrote is none of the puppet's bytes; the puppet says so, having received them.
    cx.post(Op::Recv, 10, 0, 0)?;
    same!(cx.answer()?, Err(9999), "what the peer makes of the program's bytes");
    sys::close(NUMBER)?;
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.recv(5000)?;
    bye(cx)?;
    Ok(())
}

/// What a program has read of the connection, and written to `rd`.
fn has_read(cx: &mut Cx, pid: libc::pid_t, rd: RawFd) -> Res {
    let b = read_all(rd)?;
    same!(sys::waitpid(pid)?, 0, "status of the program");
    same!(b.len(), 1000, "bytes that the program read");
    cx.take(&b)?;
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.recv(5000)?;
    bye(cx)?;
    Ok(())
}

/// A program that cannot be preloaded gets as its standard input what it does not inherit otherwise.
fn as_input(cx: &mut Cx) -> Res {
    if !std::path::Path::new(STATIC[0]).exists() {
        return untried(&format!("no {}", STATIC[0]));
    }
    sys::fcntl(cx.fd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    cx.tell(Op::Send, 1000, 0, 0)?;
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let pid = start_with(How::Spawn, &[STATIC[0], "head", "-c", "1000"], &[(cx.fd, 0), (wr, 1)])?;
    sys::close(wr)?;
    has_read(cx, pid, rd)
}

/// One that is searched for by its name.
fn by_name(cx: &mut Cx, spawned: bool) -> Res {
    if !std::path::Path::new(STATIC[0]).exists() {
        return untried(&format!("no {}", STATIC[0]));
    }
    std::env::set_var("PATH", "/nowhere:/bin");
    sys::dup2(cx.fd, NUMBER)?;
    cx.tell(Op::Send, 1000, 0, 0)?;
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let argv = [c"busybox", c"sh", c"-c", c"head -c 1000 <&57 >&58"].map(|w| w.as_ptr().cast_mut());
    let argv = [argv[0], argv[1], argv[2], argv[3], null_mut()];
    sys::dup2(wr, NUMBER + 1)?;
    let mut pid = 0;
    // SAFETY: the array ends with a null; a forked child does nothing but become the program.
    unsafe {
        if spawned {
            let e = libc::posix_spawnp(&mut pid, argv[0], std::ptr::null(), std::ptr::null(), argv.as_ptr(), environ);
            same!(e, 0, "posix_spawnp");
        } else {
            pid = sys::fork()?;
            if pid == 0 {
                libc::execvp(argv[0], argv.as_ptr().cast());
                libc::_exit(127);
            }
        }
    }
    for fd in [wr, NUMBER, NUMBER + 1] {
        sys::close(fd)?;
    }
    has_read(cx, pid, rd)
}

fn no_file(cx: &mut Cx) -> Res {
    // A pipe that has a writer and nothing in it: whoever reads it to learn what it is waits for ever.
    let (rd, wr) = sys::pipe()?;
    for how in [How::Fork, How::Vfork] {
        let pid = start(how, &[&format!("/proc/self/fd/{rd}")], wr)?;
        same!(sys::waitpid(pid)? >> 8, 127, "status of a child that could not execute a pipe");
    }
    cx.tell(Op::Send, 1000, 0, 0)?;
    cx.recv(1000)?;
    bye(cx)?;
    Ok(())
}

fn untouched(cx: &mut Cx) -> Res {
    // A helper that closes what it inherits, and lives on.
    sys::dup2(cx.fd, NUMBER)?;
    for how in [How::Fork, How::Vfork, How::Spawn] {
        let (rd, wr) = sys::pipe()?;
        sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
        let pid = start(how, &["/bin/bash", "-c", "exec 57<&-; echo x; sleep 0.3"], wr)?;
        sys::close(wr)?;
        sys::read_exact(rd, &mut [0])?;
        cx.leave_tcp()?;
        sys::waitpid(pid)?;
        sys::close(rd)?;
    }
    sys::close(NUMBER)?;
    bye(cx)?;
    Ok(())
}

/// A program waits for bytes of a connection before enough has gone through it to be worth a ring. Then enough does.
fn before_anybody_looks(cx: &mut Cx, how: How, words: &[&str]) -> Res {
    if !std::path::Path::new(words[0]).exists() {
        return untried(&format!("no {}", words[0]));
    }
    child_must_leave_tcp(cx)?;
    // A child has nobody yet who could be asked for it.
    let pid = child(|| {
        cx.renew()?;
        sys::dup2(cx.fd, NUMBER)?;
        let (rd, wr) = sys::pipe()?;
        sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
        let pid = start(how, words, wr)?;
        sys::close(wr)?;
        crate::util::pause_ms(200);
        cx.post(Op::Recv, 100 * 16, 0, 0)?;
        for _ in 0..100 {
            cx.send(16)?;
            crate::util::pause_ms(3);
        }
        cx.wait()?;
        sys::close(NUMBER)?;
        cx.tell(Op::Send, 1000, 0, 0)?;
        has_read(cx, pid, rd)
    })?;
    reap(pid)
}

fn outlives(cx: &mut Cx) -> Res {
    // We close the connection; a program that we have started goes on with it.
    sys::dup2(cx.fd, NUMBER)?;
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let pid = start(How::Fork, &["/bin/bash", "-c", "sleep 0.2; head -c 1000 <&57"], wr)?;
    sys::close(wr)?;
    sys::close(NUMBER)?;
    let fd = std::mem::replace(&mut cx.fd, -1);
    crate::util::pause_ms(50);
    sys::close(fd)?;
    cx.tell(Op::Send, 1000, 0, 0)?;
    let b = read_all(rd)?;
    ensure!(b.len() == 1000, "the program read {} bytes", b.len());
    cx.take(&b)?;
    sys::waitpid(pid)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads in the end");
    Ok(())
}

/// The peer is stopped for `ms` milliseconds, from before the program is there: what it reads in the end is what was sent, and
/// none of the frames by which the connection comes home.
fn of_a_stopped_peer(cx: &mut Cx, ms: u64, words: &[&str]) -> Res {
    const GO_ON: u8 = b'.';
    child_must_leave_tcp(cx)?;
    let (l, port) = sys::listen(0, 4)?;
    let pid = child(|| {
        let fd = sys::accept(l, 0)?;
        let mut b = [0; 16];
        while b[0] != GO_ON {
            sys::read_exact(fd, &mut b)?;
            sys::write_all(fd, &b)?;
        }
        sys::write_all(fd, &[b'x'; 1000])?;
        // SAFETY: no pointers.
        unsafe { libc::raise(libc::SIGSTOP) };
        sys::read_exact(fd, &mut b[..10])?;
        same!(&b[..10], b"0123456789", "what the program wrote");
        Ok(())
    })?;
    let fd = sys::connect(port)?;
    let mut b = [0; 16];
    let mut trip = |what: u8| -> Result<bool, Why> {
        let before = sys::tcp_bytes(fd)?;
        sys::write_all(fd, &[what; 16])?;
        sys::read_exact(fd, &mut b)?;
        Ok(sys::tcp_bytes(fd)? == before)
    };
    let mut left = false;
    for i in 0..2000 {
        left |= trip(b'-')?;
        if i > 80 && (left || !cx.is_to_leave()) {
            break;
        }
        crate::util::pause_ms(u64::from(i % 8 == 7));
    }
    ensure!(left || !cx.is_to_leave(), "the connection never left TCP");
    trip(GO_ON)?;
    let mut st = 0;
    // SAFETY: room for one int.
    same!(unsafe { libc::waitpid(pid, &mut st, libc::WUNTRACED) }, pid, "the peer is stopped");
    ensure!(libc::WIFSTOPPED(st), "the peer has ended: {st:#x}");
    sys::dup2(fd, NUMBER)?;
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let image = start(How::Fork, words, wr)?;
    sys::close(wr)?;
    crate::util::pause_ms(ms);
    sys::kill(pid, libc::SIGCONT)?;
    let b = read_all(rd)?;
    same!(sys::waitpid(image)?, 0, "status of the program");
    ensure!(b == [b'x'; 1000], "the program read {} bytes: {:?}", b.len(), &b[..b.len().min(40)]);
    for fd in [fd, NUMBER, l, rd] {
        sys::close(fd)?;
    }
    reap(pid)?;
    cx.warm(4, 0)
}
