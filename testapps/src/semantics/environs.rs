//! What surrounds a connection: filters of system calls, other users, other roots, a second libc, options of listeners.

use super::counted::stays;
use super::cx::{child_must_leave_tcp, untried, Cx, Op, Res, Why};
use super::procs::{child, reap};
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{c_int, c_long, c_void, POLLIN, SOL_SOCKET};
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("seccomp-by-prctl", |cx| confined(cx, by_prctl)),
    ("seccomp-by-syscall", |cx| confined(cx, by_syscall)),
    ("seccomp-after-the-peer-has-gone", confined_rest),
    ("seccomp-asked-for", seccomp_asked),
    ("alone-in-a-namespace", alone),
    ("other-user", other_user),
    ("other-root", other_root),
    ("locked-memory", locked_memory),
    ("little-address-space", little_space),
    ("stopped-for-a-while", stopped),
    ("daemon", daemon),
    ("second-libc", second_libc),
    ("plugin-with-its-own-names-first", |cx| plugin(cx, libc::RTLD_DEEPBIND)),
    ("plugin", |cx| plugin(cx, 0)),
    ("libc-by-its-name", libc_by_name),
    ("sigurg", sigurg),
    ("aio", aio),
    ("aio-of-the-kernel", kernel_aio),
    ("deferred-accept", |cx| listener(cx, libc::TCP_DEFER_ACCEPT, false)),
    ("fast-open", |cx| listener(cx, libc::TCP_FASTOPEN, true)),
    ("connect-that-waits-for-bytes", late_connect),
    ("two-listeners-on-a-port", shared_port),
    ("ulp", |cx| taken_over(cx, libc::TCP_ULP, b"tls\0")),
    ("repair", repair),
    ("peek-offset", peek_offset),
    ("zero-copy-receive", zero_copy),
];

// What a small server needs, it may go on to use; for what the library would use beside that the process is killed.
const FORBIDDEN: &[c_long] = &[
    libc::SYS_futex_waitv,
    libc::SYS_memfd_create,
    libc::SYS_eventfd2,
    libc::SYS_getrusage,
    // Elsewhere they are what libc makes of `poll` and `epoll_wait`.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_sched_yield,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_fallocate,
    libc::SYS_ioctl,
];

fn program() -> Vec<libc::sock_filter> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // The number is the first word of struct seccomp_data.
    let mut all = vec![libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 }];
    for n in FORBIDDEN {
        all.push(libc::sock_filter { code: EQUAL, jt: 0, jf: 1, k: *n as u32 });
        all.push(libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_KILL_PROCESS });
    }
    all.push(libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW });
    all
}

fn by_prctl(p: &libc::sock_fprog) -> c_long {
    // SAFETY: the program is valid.
    unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER as usize, p as *const libc::sock_fprog).into()
    }
}

/// For all threads.
fn by_syscall(p: &libc::sock_fprog) -> c_long {
    // SAFETY: as above.
    unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            p as *const libc::sock_fprog,
        )
    }
}

fn confined(cx: &mut Cx, install: fn(&libc::sock_fprog) -> c_long) -> Res {
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, libc::EPOLLIN as u32, 7)?;
    let mut filter = program();
    let p = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: no pointers.
    same!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0, "no new privileges");
    same!(install(&p), 0, "the filter");
    cx.warm(20, 0)?;
    cx.tell(Op::Send, 100, 0, 0)?;
    same!(wait_plainly(ep), 1, "epoll_wait");
    cx.recv(100)?;
    cx.renew()?;
    cx.warm(200, 10)?;
    cx.tell(Op::Send, 100_000, 0, 0)?;
    cx.recv(100_000)
}

/// libseccomp asks so what the kernel knows (in every QEMU). Nothing is confined by that.
fn seccomp_asked(cx: &mut Cx) -> Res {
    // SAFETY: no pointers.
    let ask = |op: u32, flags: usize| unsafe { libc::syscall(libc::SYS_seccomp, op, flags, 0usize) };
    let tsync = libc::SECCOMP_FILTER_FLAG_TSYNC as usize;
    same!((ask(libc::SECCOMP_SET_MODE_FILTER, tsync), sys::errno()), (-1, libc::EFAULT), "no filter at all");
    same!((ask(libc::SECCOMP_SET_MODE_STRICT, 1), sys::errno()), (-1, libc::EINVAL), "strict, and flags");
    let nothing = libc::sock_fprog { len: 0, filter: core::ptr::null_mut() };
    same!((by_syscall(&nothing), sys::errno()), (-1, libc::EINVAL), "an empty filter");
    same!((by_prctl(&nothing), sys::errno()), (-1, libc::EINVAL), "an empty filter by prctl");
    // SAFETY: no pointers.
    let r = unsafe { libc::prctl(libc::PR_SET_SECCOMP, 77, 0, 0, 0) };
    same!((r, sys::errno()), (-1, libc::EINVAL), "a mode that there is not");
    stays(cx)
}

/// The peer has closed; what it sent is whole.
fn confined_rest(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.arrive(5000)?;
    let mut filter = program();
    let p = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: no pointers.
    same!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0, "no new privileges");
    same!(by_prctl(&p), 0, "the filter");
    cx.recv(5000)?;
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv then");
    Ok(())
}

/// `epoll_wait` as libc has it: `epoll_pwait` where there is no other call.
fn wait_plainly(ep: RawFd) -> c_int {
    // SAFETY: one event.
    unsafe {
        let mut e: libc::epoll_event = core::mem::zeroed();
        libc::epoll_wait(ep, &mut e, 1, 5000)
    }
}

/// A program of one thread goes to a user namespace, which one of several must not.
fn alone(_: &mut Cx) -> Res {
    reap(child(|| {
        let (l, port) = sys::listen_at(sys::host(), 0, 1)?;
        let ours = sys::connect(port)?;
        let theirs = sys::accept(l, 0)?;
        let trips = |n: u32| {
            for i in 0..n {
                for (from, to) in [(ours, theirs), (theirs, ours)] {
                    let mut b = [0; 100];
                    sys::write_all_fd(from, &[i as u8; 100])?;
                    sys::read_exact(to, &mut b)?;
                    same!(b, [i as u8; 100], "what has come");
                }
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
            Ok(())
        };
        trips(500)?;
        // SAFETY: no pointers.
        let r = unsafe { libc::unshare(libc::CLONE_NEWUSER) };
        ensure!(r == 0 || sys::errno() != libc::EINVAL, "it is not alone");
        trips(500)
    })?)
}

/// The program gives up root, in the middle and before a new connection.
fn other_user(cx: &mut Cx) -> Res {
    // SAFETY: no pointers.
    if unsafe { libc::geteuid() } != 0 {
        return untried("the user is not root");
    }
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: no pointers.
    same!(unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) }, 0, "setresgid");
    // SAFETY: no pointers.
    same!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0, "setresuid");
    go_on(cx)
}

/// The program goes where there is no `/proc` and no `/dev`.
fn other_root(cx: &mut Cx) -> Res {
    // SAFETY: no pointers.
    if unsafe { libc::geteuid() } != 0 {
        return untried("the user is not root");
    }
    // SAFETY: paths that end with a NUL.
    unsafe {
        same!(libc::chroot(c"/mnt".as_ptr()), 0, "chroot");
        same!(libc::chdir(c"/".as_ptr()), 0, "chdir");
    }
    go_on(cx)
}

/// On the old connection, and on a new one.
fn go_on(cx: &mut Cx) -> Res {
    cx.warm(20, 0)?;
    cx.renew()?;
    cx.warm(200, 10)?;
    cx.tell(Op::Send, 100_000, 0, 0)?;
    cx.recv(100_000)?;
    cx.warm(20, 0)
}

/// A number of kilobytes in `/proc/self/status`.
fn status_kb(name: &str) -> Result<u64, Why> {
    let text = std::fs::read_to_string("/proc/self/status").map_err(|e| Why(e.to_string()))?;
    let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or("");
    line.trim().trim_end_matches(" kB").parse().map_err(|_| Why(format!("{name} {line}")))
}

/// A program that may not be paged out: what it does not use must not become memory.
fn locked_memory(cx: &mut Cx) -> Res {
    let before = status_kb("VmRSS:")?;
    // SAFETY: no pointers.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        return untried(&format!("mlockall: {}", sys::strerror(sys::errno())));
    }
    with_myself()?;
    go_on(cx)?;
    let more = status_kb("VmRSS:")?.saturating_sub(before);
    ensure!(more < 100_000, "{more} kB more than before");
    Ok(())
}

/// What the program may still map, it can map after its connections have moved, too.
fn little_space(cx: &mut Cx) -> Res {
    const LEFT: u64 = 600 << 20;
    let limit = (status_kb("VmSize:")? << 10) + LEFT;
    let r = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: `r` is readable.
    same!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &r) }, 0, "setrlimit");
    with_myself()?;
    // SAFETY: a new mapping, which nobody uses.
    let at = unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(core::ptr::null_mut(), LEFT as usize / 2, prot, flags, -1, 0)
    };
    ensure!(at != libc::MAP_FAILED, "mmap of half of what was left: {}", sys::strerror(sys::errno()));
    go_on(cx)
}

/// As for a checkpoint.
fn stopped(cx: &mut Cx) -> Res {
    cx.post(Op::SendBits, 200, 700, 500)?;
    // SAFETY: no preconditions.
    let me = unsafe { libc::getpid() };
    let pid = sys::fork()?;
    if pid == 0 {
        for _ in 0..3 {
            util::pause_ms(20);
            let _ = sys::kill(me, libc::SIGSTOP);
            util::pause_ms(60);
            let _ = sys::kill(me, libc::SIGCONT);
        }
        // SAFETY: no destructors of the parent's are to run.
        unsafe { libc::_exit(0) };
    }
    cx.recv(200 * 700)?;
    cx.wait()?;
    same!(sys::waitpid(pid)?, 0, "the child");
    cx.warm(20, 0)
}

/// libc's `daemon`: the parent ends, and its child goes on with the connection.
fn daemon(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let pid = sys::fork()?;
    if pid == 0 {
        // SAFETY: no pointers.
        if unsafe { libc::daemon(0, 0) } != 0 {
            sys::exit(1);
        }
        let said = match cx.warm(20, 0).and_then(|()| cx.renew()).and_then(|()| cx.warm(200, 10)) {
            Ok(()) => "ok".into(),
            Err(Why(text)) => text,
        };
        let _ = sys::write(wr, said.as_bytes());
        // SAFETY: no destructors of the parent's are to run.
        unsafe { libc::_exit(0) };
    }
    sys::close(wr)?;
    same!(sys::waitpid(pid)?, 0, "the daemon's parent");
    let mut b = [0; 200];
    ensure!(sys::wait1(rd, POLLIN, 8000)? != 0, "the daemon is silent");
    let n = sys::read(rd, &mut b)?;
    same!(core::str::from_utf8(&b[..n]), Ok("ok"), "the daemon");
    // It has closed the old one, and has the new one for itself.
    sys::close(cx.fd)?;
    cx.fd = -1;
    Ok(())
}

/// A library with a libc of its own uses the connection.
fn second_libc(cx: &mut Cx) -> Res {
    // SAFETY: a name that ends with a NUL; the symbol has that type.
    let receive = unsafe {
        let lib = libc::dlmopen(libc::LM_ID_NEWLM, c"libc.so.6".as_ptr(), libc::RTLD_NOW);
        if lib.is_null() {
            return Err(Why(format!("dlmopen: {:?}", CStr::from_ptr(libc::dlerror()))));
        }
        core::mem::transmute::<*mut c_void, Receive>(libc::dlsym(lib, c"recv".as_ptr()))
    };
    cx.warm(20, 0)?;
    cx.tell(Op::Send, 500, 0, 0)?;
    let mut b = [0u8; 500];
    // SAFETY: the buffer is of that length.
    let n = unsafe { receive(cx.fd, b.as_mut_ptr().cast(), b.len(), libc::MSG_WAITALL) };
    same!(n, 500, "a recv of another libc");
    cx.take(&b)?;
    cx.warm(20, 0)
}

type Send = unsafe extern "C" fn(c_int, *const c_void, usize, c_int) -> isize;
type Receive = unsafe extern "C" fn(c_int, *mut c_void, usize, c_int) -> isize;

/// Functions of a library that the program has found by their names.
struct Found {
    send: Send,
    receive: Receive,
    poll: Box<dyn Fn(c_int) -> c_int>,
}

/// Loads a library, and finds a function in it.
fn load(path: &CStr, how: c_int) -> Result<impl Fn(&CStr) -> Result<*mut c_void, Why>, Why> {
    // SAFETY: a name that ends with a NUL.
    let lib = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | how) };
    let error = || {
        // SAFETY: no preconditions; a C string or null.
        unsafe { Some(libc::dlerror()).filter(|e| !e.is_null()).map(|e| CStr::from_ptr(e).to_owned()) }
    };
    let why = error();
    ensure!(!lib.is_null(), "dlopen: {why:?}");
    ensure!(why.is_none(), "an error after dlopen has found the library: {why:?}");
    Ok(move |name: &CStr| {
        // SAFETY: a handle, and a name that ends with a NUL.
        let at = unsafe { libc::dlsym(lib, name.as_ptr()) };
        let why = error();
        ensure!(!at.is_null() && why.is_none(), "dlsym of {name:?}: {at:?} {why:?}");
        Ok(at)
    })
}

/// A plugin uses the connection beside the program. With `RTLD_DEEPBIND` its calls lead to libc past whatever was preloaded.
fn plugin(cx: &mut Cx, how: c_int) -> Res {
    let path = std::env::current_exe().map_err(|e| Why(e.to_string()))?.with_file_name("libringsock_plugin.so");
    if !path.exists() {
        return untried(&format!("{} is not there", path.display()));
    }
    let path = std::ffi::CString::new(path.into_os_string().into_encoded_bytes()).map_err(|e| Why(e.to_string()))?;
    let at = load(&path, how)?;
    // SAFETY: the symbols have these types.
    let found = unsafe {
        let poll: unsafe extern "C" fn(c_int, i16, c_int) -> c_int = core::mem::transmute(at(c"plugin_poll")?);
        Found {
            send: core::mem::transmute::<*mut c_void, Send>(at(c"plugin_send")?),
            receive: core::mem::transmute::<*mut c_void, Receive>(at(c"plugin_recv")?),
            poll: Box::new(move |fd| poll(fd, POLLIN, 5000)),
        }
    };
    beside(cx, found)
}

/// A program asks for libc by its name, as Python's ctypes and .NET's P/Invoke do, and uses the connection by what it finds.
fn libc_by_name(cx: &mut Cx) -> Res {
    let at = load(c"libc.so.6", 0)?;
    ensure!(at(c"no_such_function").is_err(), "libc has what it has not");
    for (name, linked) in [
        (c"dlsym", libc::dlsym as *const ()),
        (c"syscall", libc::syscall as *const ()),
        (c"execl", libc::execl as *const ()),
        (c"getpid", libc::getpid as *const ()),
    ] {
        same!(at(name)? as usize, linked as usize, "{name:?}");
    }
    // SAFETY: the symbols have these types; one pollfd, valid for the call.
    let found = unsafe {
        let poll: unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, c_int) -> c_int =
            core::mem::transmute(at(c"poll")?);
        Found {
            send: core::mem::transmute::<*mut c_void, Send>(at(c"send")?),
            receive: core::mem::transmute::<*mut c_void, Receive>(at(c"recv")?),
            poll: Box::new(move |fd| {
                let mut one = libc::pollfd { fd, events: POLLIN, revents: 0 };
                match poll(&mut one, 1, 5000) {
                    1 => one.revents.into(),
                    n => n,
                }
            }),
        }
    };
    beside(cx, found)
}

/// The connection is used by the program's own calls and by others that it has found.
fn beside(cx: &mut Cx, found: Found) -> Res {
    cx.leave_tcp()?;
    let before = sys::tcp_bytes(cx.fd)?;
    for i in 0..50 {
        let n = 10 + 7 * i;
        // Now the program's own sends, now the other, and who receives changes at half that rate.
        if i % 2 == 0 {
            cx.send(n)?;
        } else {
            let b = cx.out(n);
            // SAFETY: the buffer is of that length.
            same!(unsafe { (found.send)(cx.fd, b.as_ptr().cast(), n, 0) }, n as isize, "the other send");
        }
        cx.tell(Op::Recv, n as u64, 0, 0)?;
        cx.later(2, n as u64)?;
        same!((found.poll)(cx.fd), POLLIN.into(), "the other poll");
        let mut b = vec![0u8; n];
        if i % 4 < 2 {
            // SAFETY: the buffer is of that length.
            let got = unsafe { (found.receive)(cx.fd, b.as_mut_ptr().cast(), n, libc::MSG_WAITALL) };
            same!(got, n as isize, "the other recv");
        } else {
            same!(sys::recv(cx.fd, &mut b, libc::MSG_WAITALL)?, n, "the program's recv");
        }
        cx.take(&b)?;
        cx.wait()?;
    }
    if cx.ring {
        same!(sys::tcp_bytes(cx.fd)?, before, "the bytes by TCP");
    }
    cx.warm(20, 0)
}

static URGENT: AtomicU32 = AtomicU32::new(0);

extern "C" fn urgent(_: c_int) {
    URGENT.fetch_add(1, SeqCst);
}

fn sigurg(cx: &mut Cx) -> Res {
    sys::sigaction(libc::SIGURG, urgent, libc::SA_RESTART)?;
    // SAFETY: no preconditions.
    sys::fcntl(cx.fd, libc::F_SETOWN, unsafe { libc::getpid() })?;
    cx.tell(Op::Urgent, 0, 0, 0)?;
    for _ in 0..500 {
        if URGENT.load(SeqCst) > 0 {
            break;
        }
        util::pause_ms(10);
    }
    same!(URGENT.load(SeqCst), 1, "signals for one urgent byte");
    let mut b = [0; 1];
    same!(sys::recv(cx.fd, &mut b, libc::MSG_OOB)?, 1, "the urgent byte");
    cx.warm(20, 0)
}

fn aio(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 200, 0, 0)?;
    cx.arrive(200)?;
    let mut b = [0u8; 200];
    // SAFETY: the block and its buffer live until the request is done.
    let n = unsafe {
        let mut cb: libc::aiocb = core::mem::zeroed();
        cb.aio_fildes = cx.fd;
        cb.aio_buf = b.as_mut_ptr().cast();
        cb.aio_nbytes = b.len();
        same!(libc::aio_read(&mut cb), 0, "aio_read");
        let list = [&raw const cb];
        for _ in 0..50 {
            if libc::aio_error(&cb) != libc::EINPROGRESS {
                break;
            }
            let limit = libc::timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            libc::aio_suspend(list.as_ptr(), 1, &limit);
        }
        same!(libc::aio_error(&cb), 0, "aio_error");
        libc::aio_return(&mut cb)
    };
    same!(n, 200, "aio_return");
    cx.take(&b)?;
    cx.warm(20, 0)
}

/// `struct iocb` (linux/aio_abi.h).
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    op: u16,
    prio: i16,
    fd: u32,
    buf: u64,
    n: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// The kernel reads and writes by itself (`io_submit(2)`).
fn kernel_aio(cx: &mut Cx) -> Res {
    const READ: u16 = 0;
    const WRITE: u16 = 1;
    let mut context = 0usize;
    // SAFETY: room for the context.
    if unsafe { libc::syscall(libc::SYS_io_setup, 4, &mut context) } != 0 {
        return untried(&format!("io_setup: {}", sys::strerror(sys::errno())));
    }
    let submit = |op: u16, fd: RawFd, b: *mut u8, n: usize| {
        let cb = Iocb { op, fd: fd as u32, buf: b as u64, n: n as u64, ..Iocb::default() };
        let (list, mut done) = ([&raw const cb], [[0i64; 4]]);
        let limit = libc::timespec { tv_sec: 5, tv_nsec: 0 };
        // SAFETY: the block and its buffer live until the request is done, or the process ends.
        unsafe {
            same!(libc::syscall(libc::SYS_io_submit, context, 1, list.as_ptr()), 1, "io_submit");
            same!(libc::syscall(libc::SYS_io_getevents, context, 1, 1, done.as_mut_ptr(), &limit), 1, "io_getevents");
        }
        same!(done[0][2], n as i64, "what it came to");
        Ok(())
    };
    cx.tell(Op::Send, 200, 0, 0)?;
    cx.arrive(200)?;
    let mut b = [0u8; 200];
    submit(READ, cx.fd, b.as_mut_ptr(), 200)?;
    cx.take(&b)?;
    let mut b = cx.out(300);
    submit(WRITE, cx.fd, b.as_mut_ptr(), 300)?;
    same!(cx.tell(Op::Recv, 300, 0, 0)?, 300, "bytes that arrived");
    cx.warm(20, 0)
}

/// A pair over a listener of our own with an option; with `fast`, the first bytes come with the SYN.
fn listener(cx: &mut Cx, option: c_int, fast: bool) -> Res {
    let (l, port) = sys::listen(0, 8)?;
    sys::setsockopt(l, libc::IPPROTO_TCP, option, 5 as c_int)?;
    let to = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([127, 0, 0, 1]).to_be() },
        sin_zero: [0; 8],
    };
    let c = if fast { sys::tcp_socket()? } else { sys::connect(port)? };
    let first = [0x5a; 100];
    // SAFETY: the address is of its length.
    let n = unsafe {
        let (at, len) = (&raw const to, size_of_val(&to) as u32);
        match fast {
            true => libc::sendto(c, first.as_ptr().cast(), 100, libc::MSG_FASTOPEN, at.cast(), len),
            false => libc::send(c, first.as_ptr().cast(), 100, 0),
        }
    };
    same!(n, 100, "the first bytes");
    let s = sys::accept(l, libc::SOCK_CLOEXEC)?;
    let mut b = [0; 100];
    sys::read_exact(s, &mut b)?;
    same!(b, first, "the first bytes");
    talk(c, s)?;
    for fd in [l, c, s] {
        sys::close(fd)?;
    }
    cx.warm(20, 0)
}

/// A network of its own for this process, in which nothing is asked before a connection may begin with bytes. Whoever may
/// not make one gets the ordinary kind of connection: false.
fn open_at_once() -> Result<bool, Why> {
    // SAFETY: no pointers.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Ok(false);
    }
    // SAFETY: plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[..2].copy_from_slice(&[b'l' as _, b'o' as _]);
    request.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
    let fd = sys::tcp_socket()?;
    // SAFETY: the request is what the call takes.
    same!(unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS as _, &request) }, 0, "SIOCSIFFLAGS");
    sys::close(fd)?;
    std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "519").map_err(|e| Why(e.to_string()))?;
    Ok(true)
}

/// `connect` succeeds, and does nothing until there are bytes to go with it (`TCP_FASTOPEN_CONNECT`).
fn late_connect(cx: &mut Cx) -> Res {
    child_must_leave_tcp(cx)?;
    let pid = child(|| {
        let late = open_at_once()?;
        for bytes in [1, 100, 5000] {
            let (l, port) = sys::listen(0, 8)?;
            sys::setsockopt(l, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 5 as c_int)?;
            let c = sys::tcp_socket()?;
            sys::setsockopt(c, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1 as c_int)?;
            sys::connect_to(c, port)?;
            ensure!(sys::tcp_is_connected(c)? != late, "connected before there were bytes: {}", !late);
            ensure!(sys::poll1(c, libc::POLLOUT, 1000)? & libc::POLLOUT != 0, "it cannot be written to");
            let first = vec![0x5a; bytes];
            same!(sys::write(c, &first)?, bytes, "the first bytes");
            let s = sys::accept(l, libc::SOCK_CLOEXEC)?;
            let mut got = vec![0; bytes];
            sys::read_exact(s, &mut got)?;
            same!(got, first, "the first bytes");
            talk(c, s)?;
            let before = sys::tcp_bytes(s)?;
            talk(c, s)?;
            ensure!(!cx.is_to_leave() || sys::tcp_bytes(s)? == before, "the connection never left TCP");
            [l, c, s].into_iter().try_for_each(sys::close)?;
        }
        Ok(())
    })?;
    reap(pid)?;
    cx.warm(20, 0)
}

/// Enough for a connection of one process with itself to leave TCP.
fn talk(c: RawFd, s: RawFd) -> Res {
    let mut got = [0u8; 64];
    for i in 0..300u32 {
        let sent = [i as u8; 64];
        for (from, to) in [(c, s), (s, c)] {
            same!(sys::write(from, &sent)?, 64, "write {i}");
            ensure!(sys::wait1(to, POLLIN, 5000)? & POLLIN != 0, "poll {i}");
            sys::read_exact(to, &mut got)?;
            same!(got, sent, "bytes of {i}");
        }
        if i % 50 == 0 {
            util::pause_ms(5);
        }
    }
    Ok(())
}

/// A connection of the process with itself, to which none may have led before.
fn with_myself() -> Res {
    let (l, port) = sys::listen(0, 8)?;
    let c = sys::connect(port)?;
    let s = sys::accept(l, libc::SOCK_CLOEXEC)?;
    talk(c, s)?;
    for fd in [l, c, s] {
        sys::close(fd)?;
    }
    Ok(())
}

/// Two listeners share a port; each connection is accepted where the kernel puts it.
fn shared_port(cx: &mut Cx) -> Res {
    let bound = |port: u16| -> Result<(RawFd, u16), Why> {
        let l = sys::tcp_socket()?;
        sys::setsockopt(l, SOL_SOCKET, libc::SO_REUSEPORT, 1 as c_int)?;
        let at = libc::sockaddr_in {
            sin_family: libc::AF_INET as u16,
            sin_port: port.to_be(),
            sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([127, 0, 0, 1]).to_be() },
            sin_zero: [0; 8],
        };
        // SAFETY: the address is of its length.
        same!(unsafe { libc::bind(l, (&raw const at).cast(), size_of_val(&at) as u32) }, 0, "bind");
        // SAFETY: no pointers.
        same!(unsafe { libc::listen(l, 16) }, 0, "listen");
        Ok((l, sys::sockname(l, false)?.1))
    };
    let (a, port) = bound(0)?;
    let (b, _) = bound(port)?;
    for _ in 0..8 {
        let c = sys::connect(port)?;
        let ready = sys::select(&[a, b], &[], 5000)?.0;
        let s = sys::accept(*ready.first().ok_or_else(|| Why("nobody can accept".into()))?, 0)?;
        talk(c, s)?;
        sys::close(c)?;
        sys::close(s)?;
    }
    sys::close(a)?;
    sys::close(b)?;
    cx.warm(20, 0)
}

/// An option by which the kernel takes the stream over, or refuses to.
fn taken_over(cx: &mut Cx, option: c_int, value: &[u8]) -> Res {
    // SAFETY: the value is of its length.
    let r = unsafe { libc::setsockopt(cx.fd, libc::IPPROTO_TCP, option, value.as_ptr().cast(), value.len() as u32) };
    let e = sys::errno();
    // Without keys TLS is not in force: bytes go as before.
    ensure!(r == 0 || e == libc::ENOENT || e == libc::ENOPROTOOPT, "{}", sys::strerror(e));
    cx.warm(20, 0)?;
    if r != 0 {
        return untried(&format!("the kernel has none: {}", sys::strerror(e)));
    }
    Ok(())
}

/// The sequence numbers of a connection under repair are those of the program's bytes.
fn repair(cx: &mut Cx) -> Res {
    const TCP_QUEUE_SEQ: c_int = 21;
    let numbers = |fd: RawFd| -> Result<Option<(u32, u32)>, Why> {
        if sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, 1 as c_int).is_err() {
            return Ok(None);
        }
        let mut got = [0u32; 2];
        for (queue, at) in [1 as c_int, 2].into_iter().zip(&mut got) {
            sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, queue)?;
            *at = sys::getsockopt_int(fd, libc::IPPROTO_TCP, TCP_QUEUE_SEQ)? as u32;
        }
        // -1: off without a window probe.
        sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, -1 as c_int)?;
        Ok(Some((got[0], got[1])))
    };
    let Some(before) = numbers(cx.fd)? else { return untried("TCP_REPAIR is refused") };
    cx.warm(10, 0)?;
    let Some(after) = numbers(cx.fd)? else { return Err(Why("repair is refused".into())) };
    let went = (after.0.wrapping_sub(before.0), after.1.wrapping_sub(before.1));
    same!(went, (160, 160), "bytes by the sequence numbers");
    cx.warm(20, 0)
}

/// Each look begins where the last one ended (TCP: since Linux 6.9).
fn peek_offset(cx: &mut Cx) -> Res {
    if sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_PEEK_OFF, 0 as c_int).is_err() {
        return untried("the kernel's TCP has no SO_PEEK_OFF");
    }
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    let mut b = [0; 40];
    for ahead in [0, 40] {
        same!(sys::recv(cx.fd, &mut b, libc::MSG_PEEK)?, 40, "a look at {ahead}");
        cx.look(ahead, &b)?;
    }
    cx.recv(100)?;
    cx.warm(20, 0)
}

/// Pages of the stream, mapped: what fills none is to be received as ever, and the kernel says how much that is.
fn zero_copy(cx: &mut Cx) -> Res {
    const TCP_ZEROCOPY_RECEIVE: c_int = 35;
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    // struct tcp_zerocopy_receive: address, length, and how many bytes are to be received (linux/tcp.h).
    let mut zc = [0u32; 4];
    // SAFETY: a new mapping; the struct is of its length.
    let r = unsafe {
        let at = libc::mmap(core::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, cx.fd, 0);
        ensure!(at != libc::MAP_FAILED, "mmap of a socket: {}", sys::strerror(sys::errno()));
        zc[0] = at as usize as u32;
        zc[1] = (at as usize >> 32) as u32;
        zc[2] = 4096;
        let mut len = size_of_val(&zc) as u32;
        libc::getsockopt(cx.fd, libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, zc.as_mut_ptr().cast(), &mut len)
    };
    same!((r, zc[2], zc[3]), (0, 0, 100), "result, bytes mapped, bytes to receive");
    cx.recv(100)?;
    cx.warm(20, 0)
}
