//! Programs whose main thread ends by itself: the process goes on until its last thread ends, and then exits.

use super::cx::{Cx, Res, Why};
use super::procs::child;
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{c_int, c_void};
use std::mem::{transmute, zeroed};
use std::os::fd::RawFd;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::thread::spawn;
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("main-thread-ends", |cx| ends(cx, Others::Later)),
    ("main-thread-ends-alone", |cx| ends(cx, Others::None)),
    ("main-thread-ends-last", |cx| ends(cx, Others::Before)),
    ("main-thread-ends-of-a-child-of-a-thread", |cx| ends(cx, Others::Parent)),
    ("main-thread-ends-by-a-system-call", by_a_call),
];

/// The program's other thread.
#[derive(Clone, Copy, PartialEq)]
enum Others {
    None,
    /// It ends after the main thread.
    Later,
    Before,
    /// The process was forked by it, and has it as its main thread.
    Parent,
}

/// How long the program may take.
const PATIENCE: Duration = Duration::from_secs(8);

/// Where the child tells what it does.
static TOLD: AtomicI32 = AtomicI32::new(-1);
/// A connection of its own.
static OURS: AtomicI32 = AtomicI32::new(-1);
static THEIRS: AtomicI32 = AtomicI32::new(-1);

fn tell(what: u8) {
    let _ = sys::write(TOLD.load(SeqCst), &[what]);
}

fn talk(times: u32) -> Res {
    exchange(OURS.load(SeqCst), THEIRS.load(SeqCst), times)
}

/// Round trips on a connection of the program's own, slow enough for it to move meanwhile.
pub(super) fn exchange(ours: RawFd, theirs: RawFd, times: u32) -> Res {
    for i in 0..times {
        for (from, to) in [(ours, theirs), (theirs, ours)] {
            let mut b = [0; 100];
            sys::write_all_fd(from, &[i as u8; 100])?;
            sys::read_exact(to, &mut b)?;
            same!(b, [i as u8; 100], "what has come");
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

extern "C" fn at_exit() {
    // The connection is what it was.
    tell(if talk(3).is_ok() { b'x' } else { b'!' });
}

/// Ends the calling thread from a stack on which there is nothing else: the unwinder may not pass through Rust's frames.
fn leave_on_a_stack_of_its_own() -> ! {
    let stack = Box::leak(vec![0u8; 256 << 10].into_boxed_slice());
    // SAFETY: the context is prepared as `makecontext` wants it, and is never left; `pthread_exit` takes a pointer.
    unsafe {
        let leave = transmute::<unsafe extern "C" fn(*mut c_void) -> !, extern "C" fn()>(libc::pthread_exit);
        let mut context: libc::ucontext_t = zeroed();
        libc::getcontext(&mut context);
        context.uc_stack.ss_sp = stack.as_mut_ptr().cast();
        context.uc_stack.ss_size = stack.len();
        context.uc_link = null_mut();
        libc::makecontext(&mut context, leave, 1, null_mut::<c_void>());
        libc::setcontext(&context);
    }
    unreachable!("setcontext does not return");
}

extern "C" fn ends_later(_: *mut c_void) -> *mut c_void {
    util::pause_ms(150);
    tell(if talk(50).is_ok() { b't' } else { b'!' });
    null_mut()
}

extern "C" fn ends_at_once(_: *mut c_void) -> *mut c_void {
    tell(b't');
    null_mut()
}

/// Starts a thread, of which nothing is left when it ends.
fn start(f: extern "C" fn(*mut c_void) -> *mut c_void) -> Res {
    // SAFETY: `t` is writable, and `f` takes no argument.
    let r: c_int = unsafe {
        let mut t: libc::pthread_t = zeroed();
        let r = libc::pthread_create(&mut t, null(), f, null_mut());
        if r == 0 {
            libc::pthread_detach(t);
        }
        r
    };
    same!(r, 0, "pthread_create");
    Ok(())
}

/// Moves a connection.
fn begin() -> Res {
    let (l, port) = sys::listen_at(sys::host(), 0, 1)?;
    OURS.store(sys::connect(port)?, SeqCst);
    THEIRS.store(sys::accept(l, 0)?, SeqCst);
    talk(300)
}

/// The program: moves a connection, and its main thread ends.
fn program(others: Others) -> Res {
    begin()?;
    // SAFETY: the function takes and returns nothing.
    same!(unsafe { libc::atexit(at_exit) }, 0, "atexit");
    match others {
        Others::Later => start(ends_later)?,
        Others::Before => {
            start(ends_at_once)?;
            util::pause_ms(50);
        }
        Others::None | Others::Parent => {}
    }
    leave_on_a_stack_of_its_own()
}

fn ends(_: &mut Cx, others: Others) -> Res {
    match others {
        // It stays until then.
        Others::Parent => {
            spawn(move || watch(others)).join().unwrap_or_else(|_| Err("a thread panicked".to_string().into()))
        }
        _ => watch(others),
    }
}

/// It has no other thread, so the process ends as well, with that status.
fn by_a_call(_: &mut Cx) -> Res {
    const STATUS: c_int = 3;
    let pid = child(move || {
        begin()?;
        // SAFETY: ends the calling thread, which is the program's only one.
        unsafe { libc::syscall(libc::SYS_exit, STATUS) };
        Ok(())
    })?;
    same!(status_of(pid)?, STATUS << 8, "how it has ended");
    Ok(())
}

/// How a child ends, in time.
fn status_of(pid: libc::pid_t) -> Result<c_int, Why> {
    let begun = Instant::now();
    loop {
        if let Some(status) = sys::waitpid_now(pid)? {
            return Ok(status);
        }
        if begun.elapsed() > PATIENCE {
            let _ = sys::kill(pid, libc::SIGKILL);
            let _ = sys::waitpid(pid);
            ensure!(false, "the process goes on when its last thread has ended");
        }
        util::pause_ms(5);
    }
}

/// Runs the program, and looks how it ends.
fn watch(others: Others) -> Res {
    let (rd, wr) = sys::pipe()?;
    TOLD.store(wr, SeqCst);
    let pid = child(move || program(others))?;
    same!(status_of(pid)?, 0, "how it has ended");
    sys::close(wr)?;
    let mut told = [0; 8];
    let n = sys::read(rd, &mut told)?;
    let want: &[u8] = if matches!(others, Others::Later | Others::Before) { b"tx" } else { b"x" };
    same!(&told[..n], want, "what it has done");
    sys::close(rd)?;
    Ok(())
}
