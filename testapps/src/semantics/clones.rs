//! Processes that come to be by other ways than `fork`: `vfork`, `clone`, system calls.

use super::cx::{untried, Cx, Op, Res, Why};
use super::procs::{bye, in_child, reap};
use super::Check;
use crate::{ensure, same, sys};
use libc::{c_int, c_void, POLLIN};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("vfork-child-closes", |cx| guest_closes(cx, Guest::Vfork)),
    ("clone-child-closes", |cx| guest_closes(cx, Guest::Clone)),
    ("clone-in-memory-child-closes", |cx| guest_closes(cx, Guest::CloneVm)),
    ("fork-by-syscall-child-closes", |cx| guest_closes(cx, Guest::Syscall)),
    ("clone-child-uses-it", |cx| child_uses_it(cx, bear_by_clone)),
    ("fork-by-syscall-child-uses-it", |cx| child_uses_it(cx, bear_by_syscall)),
    ("clone3-child-uses-it", |cx| child_uses_it(cx, bear_by_clone3)),
    ("clone-parent-closes", |cx| parent_closes(cx, bear_by_clone)),
    ("fork-by-syscall-parent-closes", |cx| parent_closes(cx, bear_by_syscall)),
    ("clone3-parent-closes", |cx| parent_closes(cx, bear_by_clone3)),
];

/// How a process comes to be that has numbers of its own.
#[derive(Clone, Copy)]
enum Guest {
    /// In its parent's memory, which waits for it.
    Vfork,
    /// In a copy of its parent's memory.
    Clone,
    /// In its parent's memory, which goes on.
    CloneVm,
    /// In a copy, by libc's `syscall`.
    Syscall,
}

/// `fork` as a system call, through libc.
unsafe fn fork_by_syscall() -> libc::pid_t {
    #[cfg(target_arch = "x86_64")]
    let r = libc::syscall(libc::SYS_fork);
    #[cfg(not(target_arch = "x86_64"))]
    let r = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
    r as libc::pid_t
}

/// What the child does with its number is nothing to its parent's.
fn guest_closes(cx: &mut Cx, how: Guest) -> Res {
    extern "C" fn close_it(fd: *mut c_void) -> c_int {
        // SAFETY: plain numbers; a child may do no more than this.
        unsafe {
            let fd = fd as usize as RawFd;
            let r = libc::close(fd) + libc::close(fd);
            // The second one is of a number that is free.
            libc::_exit(if r == -1 { 0 } else { 1 })
        }
    }
    let mut stack = vec![0u64; 32 << 10];
    for _ in 0..3 {
        let arg = cx.fd as usize as *mut c_void;
        // SAFETY: the child does nothing but `close_it`, on a stack of its own where it shares the memory and its parent
        // goes on; that lives until the child has ended.
        let pid = unsafe {
            match how {
                #[allow(deprecated)]
                Guest::Vfork => match libc::vfork() {
                    0 => libc::_exit(close_it(arg)),
                    pid => pid,
                },
                Guest::Clone | Guest::CloneVm => {
                    let flags = if matches!(how, Guest::CloneVm) { libc::CLONE_VM } else { 0 };
                    let top = stack.as_mut_ptr_range().end.cast();
                    libc::clone(close_it, top, flags | libc::SIGCHLD, arg)
                }
                Guest::Syscall => match fork_by_syscall() {
                    0 => libc::_exit(close_it(arg)),
                    pid => pid,
                },
            }
        };
        ensure!(pid > 0, "no child: {}", std::io::Error::last_os_error());
        reap(pid)?;
        cx.warm(20, 0)?;
    }
    bye(cx)?;
    Ok(())
}

/// Makes a child with memory of its own that does this.
type Bear = fn(&mut dyn FnMut() -> Res) -> Result<libc::pid_t, Why>;

/// On a stack of its own, from which it returns.
fn bear_by_clone(f: &mut dyn FnMut() -> Res) -> Result<libc::pid_t, Why> {
    extern "C" fn run(arg: *mut c_void) -> c_int {
        // SAFETY: it was passed below, and this is a copy of it.
        in_child(unsafe { &mut **arg.cast::<&mut dyn FnMut() -> Res>() })
    }
    let mut stack = vec![0u64; 32 << 10];
    let mut f = f;
    // SAFETY: the child has a copy of all of it.
    let pid = unsafe { libc::clone(run, stack.as_mut_ptr_range().end.cast(), libc::SIGCHLD, (&raw mut f).cast()) };
    born(pid, f)
}

fn bear_by_syscall(f: &mut dyn FnMut() -> Res) -> Result<libc::pid_t, Why> {
    // SAFETY: the child is one of a process with a single thread.
    born(unsafe { fork_by_syscall() }, f)
}

fn bear_by_clone3(f: &mut dyn FnMut() -> Res) -> Result<libc::pid_t, Why> {
    // clone3(2): the fifth word is the signal.
    let mut args = [0u64; 8];
    args[4] = libc::SIGCHLD as u64;
    // SAFETY: as before; `args` is readable.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), size_of_val(&args)) };
    if pid < 0 && sys::errno() == libc::ENOSYS {
        return untried("this kernel, or a filter, has no clone3").map(|()| 0);
    }
    born(pid as libc::pid_t, f)
}

fn born(pid: libc::pid_t, f: &mut dyn FnMut() -> Res) -> Result<libc::pid_t, Why> {
    if pid == 0 {
        sys::exit(in_child(f));
    }
    ensure!(pid > 0, "no child: {}", std::io::Error::last_os_error());
    Ok(pid)
}

/// The child writes, waits and reads, then its parent again.
fn child_uses_it(cx: &mut Cx, bear: Bear) -> Res {
    for _ in 0..3 {
        let mut c = cx.with_fd(cx.fd);
        cx.post(Op::Echo, 30, 1000, 0)?;
        let pid = bear(&mut || {
            for _ in 0..30 {
                c.send(1000)?;
                same!(sys::poll1(c.fd, POLLIN, 5_000)?, POLLIN, "what the child polls");
                c.recv(1000)?;
            }
            Ok(())
        })?;
        reap(pid)?;
        same!(cx.wait()?, 30, "messages echoed");
        (cx.rx, cx.tx) = (cx.rx + 30_000, cx.tx + 30_000);
        cx.warm(20, 0)?;
    }
    bye(cx)?;
    Ok(())
}

/// The child goes on with it alone.
fn parent_closes(cx: &mut Cx, bear: Bear) -> Res {
    let (rd, wr) = sys::pipe()?;
    let mut c = cx.with_fd(cx.fd);
    let pid = bear(&mut || {
        sys::read_exact(rd, &mut [0])?;
        c.send(100_000)?;
        c.recv(100_000)?;
        Ok(sys::close(c.fd)?)
    })?;
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Poll, 50, POLLIN as u64, 0)?, 0, "what the peer polls: the child lives");
    sys::write(wr, b"x")?;
    same!(cx.tell(Op::Recv, 100_000, 0, 0)?, 100_000, "bytes of the child");
    cx.tell(Op::Send, 100_000, 0, 0)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads when the child has closed");
    reap(pid)
}
