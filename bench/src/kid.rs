//! Processes that are measured: started, watched, ended, their processor time taken.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The end of what a process said, on both outputs.
pub(crate) fn tail(said: &str, k: &mut Kid) -> String {
    let mut err = String::new();
    if let Some(mut e) = k.child.stderr.take() {
        let _ = e.read_to_string(&mut err);
    }
    let all = format!("{} {}", said.trim(), err.trim());
    let cut = all.char_indices().rev().nth(300).map_or(0, |x| x.0);
    all[cut..].to_string()
}

/// Kills what was started for a run when it takes too long.
pub(crate) struct Watch {
    pids: Arc<Mutex<Vec<i32>>>,
    over: Arc<AtomicBool>,
    fired: Arc<AtomicBool>,
}

impl Watch {
    /// For processes that may take so long.
    pub(crate) fn new(limit: Duration) -> Watch {
        let w = Watch { pids: Arc::default(), over: Arc::default(), fired: Arc::default() };
        let (pids, over, fired) = (w.pids.clone(), w.over.clone(), w.fired.clone());
        std::thread::spawn(move || {
            let t = Instant::now();
            while !over.load(SeqCst) {
                if t.elapsed() > limit {
                    fired.store(true, SeqCst);
                    for pid in pids.lock().unwrap_or_else(|e| e.into_inner()).iter() {
                        // SAFETY: a process group that we started and have not reaped.
                        unsafe { libc::kill(-pid, libc::SIGKILL) };
                    }
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        w
    }

    /// Whether it had to kill them.
    pub(crate) fn fired(&self) -> bool {
        self.fired.load(SeqCst)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
    }
}

/// A process of ours, the leader of its group; killed when this goes.
pub(crate) struct Kid {
    /// The process.
    pub(crate) child: Child,
    ended: Option<(i32, f64)>,
    pids: Arc<Mutex<Vec<i32>>>,
}

impl Kid {
    /// Starts it, watched.
    pub(crate) fn start(mut c: Command, w: &Watch) -> Result<Kid, String> {
        let child = c.spawn().map_err(|e| format!("{}: {e}", c.get_program().to_string_lossy()))?;
        w.pids.lock().unwrap_or_else(|e| e.into_inner()).push(child.id() as i32);
        Ok(Kid { child, ended: None, pids: w.pids.clone() })
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, s: i32) {
        // SAFETY: a child of ours that is not reaped yet.
        unsafe { libc::kill(self.child.id() as i32, s) };
    }

    /// The port in the first line of a server of ours.
    pub(crate) fn announced(&mut self) -> Result<u16, String> {
        let mut r = BufReader::new(self.child.stdout.take().ok_or("no output")?);
        let mut line = String::new();
        r.read_line(&mut line).map_err(|e| e.to_string())?;
        drain(r);
        let port = line.split_whitespace().last().and_then(|w| w.parse().ok());
        port.ok_or_else(|| format!("the server did not start: {line} {}", tail("", self)))
    }

    /// Waits until somebody accepts at a port.
    pub(crate) fn ready(&mut self, host: &str, port: u16) -> Result<u16, String> {
        if let Some(o) = self.child.stdout.take() {
            drain(o);
        }
        let until = Instant::now() + Duration::from_secs(40);
        while TcpStream::connect((host, port)).is_err() {
            if Instant::now() > until {
                self.signal(libc::SIGKILL);
                return Err(format!("nobody listens at port {port}: {}", tail("", self)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some(e) = self.child.stderr.take() {
            drain(e);
        }
        Ok(port)
    }

    /// All that it prints.
    pub(crate) fn all(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut o) = self.child.stdout.take() {
            let _ = o.read_to_string(&mut text);
        }
        text
    }

    /// Asks it by a signal to end, and gives it a moment to do so with its children.
    pub(crate) fn ask_to_end(&mut self, s: i32) {
        if self.ended.is_none() {
            self.signal(s);
            let until = Instant::now() + Duration::from_secs(5);
            // SAFETY: a child of ours that is not reaped yet, and is not by this.
            let gone = |pid| unsafe {
                let mut i: libc::siginfo_t = std::mem::zeroed();
                libc::waitid(libc::P_PID, pid, &mut i, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT);
                i.si_pid() != 0
            };
            while Instant::now() < until && !gone(self.child.id()) {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Waits for its end: status (128 and more: a signal) and processor time in seconds, that of its
    /// reaped children included.
    pub(crate) fn wait(&mut self) -> (i32, f64) {
        if let Some(e) = self.ended {
            return e;
        }
        let (mut status, pid) = (0, self.child.id() as i32);
        // SAFETY: room for both answers; a child of ours.
        let used = unsafe {
            let mut u: libc::rusage = std::mem::zeroed();
            while libc::wait4(pid, &mut status, 0, &mut u) < 0 && *libc::__errno_location() == libc::EINTR {}
            let t = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
            t(u.ru_utime) + t(u.ru_stime)
        };
        self.pids.lock().unwrap_or_else(|e| e.into_inner()).retain(|p| *p != pid);
        let status = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
        self.ended = Some((status, used));
        (status, used)
    }
}

impl Drop for Kid {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // SAFETY: the group of a child of ours that is not reaped yet.
            unsafe { libc::kill(-(self.child.id() as i32), libc::SIGKILL) };
            self.wait();
        }
    }
}

/// Reads a server's output to its end, so that it never waits for us.
fn drain(mut r: impl Read + Send + 'static) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut r, &mut std::io::sink());
    });
}
