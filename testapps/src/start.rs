//! Starts other programs in each of the ways in which a program may.

use crate::sys::{self, R};
use libc::c_char;
use std::ffi::CString;
use std::os::fd::RawFd;
use std::ptr::null_mut;

/// How a process gets a program of its own.
#[derive(Clone, Copy, PartialEq)]
pub enum How {
    /// `fork` and `execve`.
    Fork,
    /// `vfork` and `execve`.
    Vfork,
    /// `posix_spawn`.
    Spawn,
}

extern "C" {
    /// The environment, as in environ(7).
    pub static environ: *const *mut c_char;
}

/// The words of a command, and where they are, with a null behind them.
struct Words {
    at: Vec<*mut c_char>,
    _text: Vec<CString>,
}

impl Words {
    fn new(words: &[&str]) -> Words {
        let text: Vec<CString> = words.iter().map(|w| CString::new(*w).expect("no NUL")).collect();
        let mut at: Vec<*mut c_char> = text.iter().map(|w| w.as_ptr().cast_mut()).collect();
        at.push(null_mut());
        Words { at, _text: text }
    }

    /// Becomes the program; returns if that fails. May be called in a child of `vfork`.
    fn execute(&self) {
        // SAFETY: both arrays end with a null.
        unsafe { libc::execve(self.at[0], self.at.as_ptr().cast(), environ.cast()) };
    }
}

/// Starts a program with `out` as its standard output.
pub fn start(how: How, words: &[&str], out: RawFd) -> R<libc::pid_t> {
    start_with(how, words, &[(out, 1)])
}

/// Starts a program that has each first fd under the second number.
pub fn start_with(how: How, words: &[&str], fds: &[(RawFd, RawFd)]) -> R<libc::pid_t> {
    let words = Words::new(words);
    let become_it = || -> ! {
        // SAFETY: plain calls that a child of vfork may make.
        unsafe {
            for (from, to) in fds {
                libc::dup2(*from, *to);
            }
            words.execute();
            libc::_exit(127)
        }
    };
    // SAFETY: a vfork child does nothing but call `become_it`; the file actions are initialised.
    unsafe {
        match how {
            How::Fork => match sys::fork()? {
                0 => become_it(),
                pid => Ok(pid),
            },
            How::Vfork =>
            {
                #[allow(deprecated)]
                match libc::vfork() {
                    0 => become_it(),
                    -1 => Err(sys::errno()),
                    pid => Ok(pid),
                }
            }
            How::Spawn => {
                let mut acts = std::mem::zeroed();
                libc::posix_spawn_file_actions_init(&mut acts);
                for (from, to) in fds {
                    libc::posix_spawn_file_actions_adddup2(&mut acts, *from, *to);
                }
                let mut pid = 0;
                let e = libc::posix_spawn(&mut pid, words.at[0], &acts, null_mut(), words.at.as_ptr(), environ);
                libc::posix_spawn_file_actions_destroy(&mut acts);
                match e {
                    0 => Ok(pid),
                    e => Err(e),
                }
            }
        }
    }
}

/// The calling process becomes a program, as far as that can be.
pub fn become_program(words: &[&str]) -> i32 {
    Words::new(words).execute();
    sys::errno()
}
