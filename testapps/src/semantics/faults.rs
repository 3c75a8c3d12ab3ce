//! Faults of the program's own are the program's, however many the library has had: its handler, with all that the kernel
//! says and in the way that it has chosen, or its death.

use super::badmem::{Bad, Pages};
use super::cx::{child_must_leave_tcp, Cx, Hosts, Op, Res, Why};
use super::jumps::{rs_app_leavable, siglongjmp, Place, LEFT};
use super::Check;
use crate::{ensure, same, sys};
use libc::{
    c_int, c_void, siginfo_t, EFAULT, SA_NODEFER, SA_ONSTACK, SA_RESETHAND, SA_RESTART, SA_SIGINFO, SIGBUS, SIGSEGV,
    SIGUSR1, SIGUSR2, SIG_DFL, SIG_IGN,
};
use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("fault-is-told", told),
    ("fault-is-told-to-who-came-first", told_early),
    ("fault-behind-the-end-of-a-file", bus),
    ("fault-on-a-stack-of-its-own", stacks),
    ("fault-with-a-mask", masks),
    ("fault-in-a-handler", nested),
    ("fault-by-signal", by_signal),
    ("fault-for-one-time", once),
    ("fault-and-a-jump", jump),
    ("fault-without-a-handler", unhandled),
    ("fault-that-was-sent", sent),
    ("fault-ignored", ignored),
    ("fault-actions-as-set", actions),
    ("fault-actions-by-syscall", raw_actions),
    ("fault-in-images", images),
    ("fault-in-threads", threads),
];

const PAGE: usize = 4096;
/// `SEGV_MAPERR`, `SEGV_ACCERR`, `BUS_ADRERR`.
const MAPERR: i32 = 1;
const ACCERR: i32 = 2;
const ADRERR: i32 = 2;
/// What libc adds to the flags.
const RESTORER: c_int = 0x0400_0000;

static COUNT: AtomicU64 = AtomicU64::new(0);
static SIG: AtomicI32 = AtomicI32::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static ADDR: AtomicUsize = AtomicUsize::new(0);
static STACK: AtomicUsize = AtomicUsize::new(0);
static MASK: AtomicU64 = AtomicU64::new(0);
static PC: AtomicUsize = AtomicUsize::new(0);

fn mask_now() -> u64 {
    let mut mask = 0u64;
    // SAFETY: as large as the kernel's.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, null::<u64>(), &raw mut mask, 8) };
    mask
}

/// Notes what it is told, and makes the page good.
extern "C" fn mend(sig: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let here = 0u8;
    // SAFETY: the kernel's arguments; the page of a fault is one of the check's.
    unsafe {
        SIG.store(sig, SeqCst);
        CODE.store((*info).si_code, SeqCst);
        STACK.store(&raw const here as usize, SeqCst);
        MASK.store(mask_now(), SeqCst);
        let c = &(*context.cast::<libc::ucontext_t>()).uc_mcontext;
        #[cfg(target_arch = "x86_64")]
        PC.store(c.gregs[libc::REG_RIP as usize] as usize, SeqCst);
        #[cfg(target_arch = "aarch64")]
        PC.store(c.pc as usize, SeqCst);
        if (*info).si_code > 0 {
            let at = (*info).si_addr() as usize;
            ADDR.store(at, SeqCst);
            let (prot, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
            libc::mmap((at & !(PAGE - 1)) as *mut c_void, PAGE, prot, flags, -1, 0);
        }
    }
    COUNT.fetch_add(1, SeqCst);
}

/// As a program does it; an older handler's flags and mask.
fn install(sig: c_int, handler: usize, flags: c_int, mask: &[c_int]) -> Result<libc::sigaction, Why> {
    // SAFETY: both are records of our own.
    unsafe {
        let mut act: libc::sigaction = std::mem::zeroed();
        let mut old: libc::sigaction = std::mem::zeroed();
        act.sa_sigaction = handler;
        act.sa_flags = flags;
        mask.iter().for_each(|s| _ = libc::sigaddset(&mut act.sa_mask, *s));
        same!(libc::sigaction(sig, &act, &mut old), 0, "sigaction");
        Ok(old)
    }
}

fn asked(sig: c_int) -> Result<libc::sigaction, Why> {
    // SAFETY: a record of our own.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        same!(libc::sigaction(sig, null(), &mut old), 0, "sigaction");
        Ok(old)
    }
}

fn handler() -> usize {
    mend as *const () as usize
}

/// The program's own doing.
#[inline(never)]
fn touch(at: *mut u8) -> u8 {
    // SAFETY: there may be no such memory; a handler sees to that.
    unsafe { at.read_volatile() }
}

/// The library's.
fn fail(cx: &Cx, p: &Pages) -> Res {
    for n in [5, 100, 1000] {
        // SAFETY: the kernel answers for bad memory.
        let r = unsafe { libc::write(cx.fd, p.end(1).cast(), n) };
        same!((r, sys::errno()), (-1, EFAULT), "write of {n}");
    }
    Ok(())
}

/// A fault at `at` is told, and nothing else was.
fn told_of(at: *mut u8, sig: c_int, code: i32) -> Res {
    let before = COUNT.load(SeqCst);
    same!(touch(at), 0, "what is there then");
    same!(COUNT.load(SeqCst), before + 1, "handlers");
    same!(SIG.load(SeqCst), sig, "signal");
    same!(CODE.load(SeqCst), code, "si_code");
    same!(ADDR.load(SeqCst), at as usize, "si_addr");
    let near = (touch as *const () as usize).abs_diff(PC.load(SeqCst));
    ensure!(near < 4096, "the program counter is {near} bytes away");
    Ok(())
}

fn told(cx: &mut Cx) -> Res {
    install(SIGSEGV, handler(), SA_SIGINFO, &[])?;
    tell(cx)
}

fn tell(cx: &mut Cx) -> Res {
    for (bad, code) in [(Bad::Hole, MAPERR), (Bad::Shut, ACCERR)] {
        let p = Pages::new(1, bad)?;
        fail(cx, &p)?;
        same!(COUNT.load(SeqCst), u64::from(bad == Bad::Shut), "handlers");
        told_of(p.end(1).wrapping_add(77), SIGSEGV, code)?;
        let b = [0u8; 200];
        // SAFETY: it is there now.
        same!(unsafe { libc::memcmp(p.end(1).cast(), b.as_ptr().cast(), 200) }, 0, "zeros");
    }
    cx.warm(8, 0)
}

/// The handler was there before there was a connection.
fn told_early(cx: &mut Cx) -> Res {
    child_must_leave_tcp(cx)?;
    let is_to_leave = cx.is_to_leave();
    // SAFETY: plain numbers.
    let pid = sys::fork()?;
    if pid > 0 {
        same!(sys::waitpid(pid)?, 0, "the child ended with status");
        return cx.warm(4, 0);
    }
    // A process of its own, which has had no connection since it got the handler.
    let code = match early(is_to_leave) {
        Ok(()) => 0,
        Err(Why(w)) => {
            eprintln!("{w}");
            1
        }
    };
    sys::exit(code)
}

fn early(is_to_leave: bool) -> Res {
    install(SIGSEGV, handler(), SA_SIGINFO, &[])?;
    let (mine, its) = sys::socketpair()?;
    std::thread::spawn(move || super::cx::puppet(its));
    let mut cx = Cx::new(mine, Hosts::here(), false, is_to_leave)?;
    tell(&mut cx)?;
    cx.tell(Op::Quit, 0, 0, 0)?;
    Ok(())
}

fn bus(cx: &mut Cx) -> Res {
    install(SIGBUS, handler(), SA_SIGINFO, &[])?;
    install(SIGSEGV, handler(), SA_SIGINFO, &[])?;
    let p = Pages::new(1, Bad::PastEnd)?;
    fail(cx, &p)?;
    same!(COUNT.load(SeqCst), 0, "handlers");
    told_of(p.end(1).wrapping_add(5), SIGBUS, ADRERR)?;
    cx.warm(4, 0)
}

fn stacks(cx: &mut Cx) -> Res {
    const SIZE: usize = 128 << 10;
    let mut own = vec![0u8; SIZE];
    let here = 0u8;
    let runs = |flags: c_int| -> Result<usize, Why> {
        install(SIGSEGV, handler(), SA_SIGINFO | flags, &[])?;
        let p = Pages::new(1, Bad::Shut)?;
        fail(cx, &p)?;
        told_of(p.end(1), SIGSEGV, ACCERR)?;
        Ok(STACK.load(SeqCst))
    };
    // SAFETY: a stack that lives as long as it is set; none, to begin with.
    let set = |at: *mut u8, flags: c_int| unsafe {
        libc::sigaltstack(&libc::stack_t { ss_sp: at.cast(), ss_flags: flags, ss_size: SIZE }, null_mut())
    };
    same!(set(null_mut(), libc::SS_DISABLE), 0, "sigaltstack");
    let near = |at: usize| at.abs_diff(&raw const here as usize) < 64 << 10;
    ensure!(near(runs(0)?), "without one");
    ensure!(near(runs(SA_ONSTACK)?), "there is none");
    same!(set(own.as_mut_ptr(), 0), 0, "sigaltstack");
    ensure!(near(runs(0)?), "not asked for");
    let range = own.as_ptr_range();
    let range = range.start as usize..range.end as usize;
    ensure!(range.contains(&runs(SA_ONSTACK)?), "on its own stack");
    same!(set(null_mut(), libc::SS_DISABLE), 0, "sigaltstack");
    cx.warm(4, 0)
}

fn masks(cx: &mut Cx) -> Res {
    let bit = |s: c_int| 1u64 << (s - 1);
    let before = mask_now();
    for (flags, mask, want) in [
        (0, &[][..], bit(SIGSEGV)),
        (SA_NODEFER, &[], 0),
        (0, &[SIGUSR1, SIGUSR2], bit(SIGSEGV) | bit(SIGUSR1) | bit(SIGUSR2)),
        (SA_NODEFER | SA_RESTART, &[SIGUSR1], bit(SIGUSR1)),
    ] {
        install(SIGSEGV, handler(), SA_SIGINFO | flags, mask)?;
        let p = Pages::new(1, Bad::Hole)?;
        fail(cx, &p)?;
        same!(mask_now(), before, "the mask after EFAULT");
        told_of(p.end(1), SIGSEGV, MAPERR)?;
        same!(MASK.load(SeqCst), before | want, "the mask in the handler");
        same!(mask_now(), before, "the mask after the handler");
    }
    cx.warm(4, 0)
}

static FD: AtomicI32 = AtomicI32::new(-1);
static SAW: AtomicI32 = AtomicI32::new(0);

/// Uses the connection, too, and with what is not there.
extern "C" fn use_it(sig: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel answers for bad memory: another page than that of this fault.
    unsafe {
        let r = libc::write(FD.load(SeqCst), ((*info).si_addr() as usize).wrapping_add(2 * PAGE) as *const c_void, 100);
        SAW.store(if r == -1 { sys::errno() } else { -1 }, SeqCst);
    }
    mend(sig, info, context);
}

fn nested(cx: &mut Cx) -> Res {
    FD.store(cx.fd, SeqCst);
    // What came by the kernel's hand while the signal is blocked would be the end.
    install(SIGSEGV, use_it as *const () as usize, SA_SIGINFO | SA_NODEFER, &[])?;
    let (one, two) = (Pages::new(1, Bad::Shut)?, Pages::new(4, Bad::Shut)?);
    fail(cx, &one)?;
    let at = two.end(2);
    for page in [2, 3] {
        // SAFETY: pages of our own.
        same!(unsafe { libc::mprotect(two.end(page).cast(), PAGE, libc::PROT_NONE) }, 0, "mprotect");
    }
    told_of(at, SIGSEGV, ACCERR)?;
    same!(SAW.load(SeqCst), EFAULT, "in the handler");
    cx.warm(4, 0)
}

extern "C" fn plain(_: c_int) {
    COUNT.fetch_add(1, SeqCst);
}

/// `signal(3)`, and a signal that was sent.
fn by_signal(cx: &mut Cx) -> Res {
    let p = Pages::new(1, Bad::Shut)?;
    let (h, g) = (plain as *const () as usize, handler());
    install(SIGSEGV, g, SA_SIGINFO, &[])?;
    // SAFETY: handlers of our own.
    unsafe {
        same!(libc::signal(SIGSEGV, h), g, "what was before");
        fail(cx, &p)?;
        same!(COUNT.load(SeqCst), 0, "handlers");
        same!(libc::raise(SIGSEGV), 0, "raise");
        same!(COUNT.load(SeqCst), 1, "handlers");
        same!(asked(SIGSEGV)?.sa_sigaction, h, "asked");
        same!(libc::signal(SIGSEGV, SIG_DFL), h, "what was before");
        same!(asked(SIGSEGV)?.sa_sigaction, SIG_DFL, "asked");
        fail(cx, &p)?;
        same!(libc::signal(SIGSEGV, SIG_IGN), SIG_DFL, "what was before");
        same!(libc::raise(SIGSEGV), 0, "raise");
        same!(libc::signal(SIGSEGV, h), SIG_IGN, "what was before");
    }
    fail(cx, &p)?;
    same!(sys::kill(std::process::id() as i32, SIGSEGV), Ok(()), "kill");
    same!(COUNT.load(SeqCst), 2, "handlers");
    cx.warm(4, 0)
}

/// Runs `f` in a child: how that ends.
fn apart(f: impl FnOnce() -> Res) -> Result<i32, Why> {
    let pid = sys::fork()?;
    if pid == 0 {
        // SAFETY: plain numbers.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 }) };
        let code = match f() {
            Ok(()) => 0,
            Err(Why(w)) => {
                eprintln!("{w}");
                1
            }
        };
        sys::exit(code);
    }
    Ok(sys::waitpid(pid)?)
}

fn once(cx: &mut Cx) -> Res {
    let st = apart(|| {
        install(SIGSEGV, handler(), SA_SIGINFO | SA_RESETHAND, &[SIGUSR1])?;
        let p = Pages::new(1, Bad::Shut)?;
        fail(cx, &p)?;
        same!(COUNT.load(SeqCst), 0, "handlers");
        same!(asked(SIGSEGV)?.sa_sigaction, handler(), "still there");
        told_of(p.end(1), SIGSEGV, ACCERR)?;
        let now = asked(SIGSEGV)?;
        same!(now.sa_sigaction, SIG_DFL, "spent");
        same!(now.sa_flags & !RESTORER, SA_SIGINFO | SA_RESETHAND, "flags");
        let p = Pages::new(1, Bad::Hole)?;
        fail(cx, &p)?;
        touch(p.end(1));
        Err(Why("it lives".into()))
    })?;
    same!(st, SIGSEGV, "status");
    cx.warm(4, 0)
}

static PLACE: Place = Place(UnsafeCell::new([0; 64]));

extern "C" fn leave(_: c_int) {
    COUNT.fetch_add(1, SeqCst);
    // SAFETY: the fault is in what `rs_app_leavable` calls.
    unsafe { siglongjmp(PLACE.0.get().cast(), 1) }
}

unsafe extern "C" fn touch_high(_: RawFd) -> isize {
    touch(ADDR.load(SeqCst) as *mut u8) as isize
}

fn jump(cx: &mut Cx) -> Res {
    install(SIGSEGV, leave as *const () as usize, 0, &[])?;
    let p = Pages::new(1, Bad::Shut)?;
    ADDR.store(p.end(1) as usize, SeqCst);
    for i in 1..=20 {
        fail(cx, &p)?;
        // SAFETY: one thread does so.
        let r = unsafe { rs_app_leavable(PLACE.0.get().cast(), touch_high, 0) };
        same!(r, LEFT, "left");
        same!(COUNT.load(SeqCst), i, "handlers");
        cx.warm(4, 0)?;
    }
    Ok(())
}

fn unhandled(cx: &mut Cx) -> Res {
    for (sig, bad) in [(SIGSEGV, Bad::Hole), (SIGSEGV, Bad::Shut), (SIGBUS, Bad::PastEnd)] {
        let st = apart(|| {
            install(sig, SIG_DFL, 0, &[])?;
            let p = Pages::new(1, bad)?;
            fail(cx, &p)?;
            touch(p.end(1));
            Err(Why("it lives".into()))
        })?;
        same!(st, sig, "status, {bad:?}");
    }
    cx.warm(4, 0)
}

fn sent(cx: &mut Cx) -> Res {
    for sig in [SIGSEGV, SIGBUS] {
        let st = apart(|| {
            install(sig, SIG_DFL, 0, &[])?;
            fail(cx, &Pages::new(1, Bad::Hole)?)?;
            sys::kill(std::process::id() as i32, sig)?;
            Err(Why("it lives".into()))
        })?;
        same!(st, sig, "status");
        install(sig, handler(), SA_SIGINFO, &[])?;
        fail(cx, &Pages::new(1, Bad::Hole)?)?;
        let before = COUNT.load(SeqCst);
        sys::kill(std::process::id() as i32, sig)?;
        for _ in 0..1000 {
            if COUNT.load(SeqCst) == before {
                crate::util::pause_ms(1);
            }
        }
        same!(COUNT.load(SeqCst), before + 1, "handlers");
        same!((SIG.load(SeqCst), CODE.load(SeqCst)), (sig, libc::SI_USER), "signal and code");
    }
    cx.warm(4, 0)
}

fn ignored(cx: &mut Cx) -> Res {
    fail(cx, &Pages::new(1, Bad::Hole)?)?;
    install(SIGSEGV, SIG_IGN, 0, &[])?;
    same!(asked(SIGSEGV)?.sa_sigaction, SIG_IGN, "asked");
    sys::kill(std::process::id() as i32, SIGSEGV)?;
    cx.warm(4, 0)?;
    // A fault cannot be.
    let st = apart(|| {
        touch(Pages::new(1, Bad::Hole)?.end(1));
        Err(Why("it lives".into()))
    })?;
    same!(st, SIGSEGV, "status");
    // An image inherits it.
    same!(shell(c"kill -SEGV $$; exit 7")?, 7 << 8, "status of the image");
    install(SIGSEGV, handler(), SA_SIGINFO, &[])?;
    fail(cx, &Pages::new(1, Bad::Hole)?)?;
    cx.warm(4, 0)
}

/// How a shell ends.
fn shell(text: &std::ffi::CStr) -> Result<i32, Why> {
    apart(|| {
        let args = [c"sh".as_ptr(), c"-c".as_ptr(), text.as_ptr(), null()];
        // SAFETY: strings, and a null at the end.
        unsafe { libc::execv(c"/bin/sh".as_ptr(), args.as_ptr()) };
        Err(Why("exec failed".into()))
    })
}

fn images(cx: &mut Cx) -> Res {
    for h in [SIG_DFL, handler()] {
        install(SIGSEGV, h, 0, &[])?;
        fail(cx, &Pages::new(1, Bad::Hole)?)?;
        same!(shell(c"kill -SEGV $$; exit 7")?, SIGSEGV, "status of the image");
        // SAFETY: a string.
        let st = unsafe { libc::system(c"kill -SEGV $$; exit 7".as_ptr()) };
        same!(st, SIGSEGV, "status of system");
    }
    cx.warm(4, 0)
}

fn actions(cx: &mut Cx) -> Res {
    let p = Pages::new(1, Bad::Hole)?;
    for sig in [SIGSEGV, SIGBUS] {
        let all = [
            (handler(), SA_SIGINFO | SA_ONSTACK, &[SIGUSR1][..]),
            (plain as *const () as usize, SA_RESTART, &[]),
            (handler(), SA_SIGINFO | SA_RESETHAND | SA_NODEFER, &[SIGUSR1, SIGUSR2]),
            (SIG_DFL, 0, &[]),
            (SIG_DFL, SA_RESTART, &[SIGUSR2]),
            (SIG_IGN, 0, &[]),
            (plain as *const () as usize, 0, &[SIGUSR1]),
        ];
        let mut before = asked(sig)?;
        for (h, flags, mask) in all {
            let old = install(sig, h, flags, mask)?;
            let now = asked(sig)?;
            same!(old.sa_sigaction, before.sa_sigaction, "the old handler");
            same!(old.sa_flags, before.sa_flags, "the old flags");
            same!(now.sa_sigaction, h, "the handler");
            same!(now.sa_flags & !RESTORER, flags, "the flags");
            for s in 1..=64 {
                // SAFETY: sets of our own.
                let has = unsafe { libc::sigismember(&now.sa_mask, s) == 1 };
                same!(has, mask.contains(&s), "signal {s} in the mask");
            }
            if h != SIG_IGN {
                fail(cx, &p)?;
            }
            before = now;
        }
        same!(asked(sig)?.sa_sigaction, before.sa_sigaction, "the handler stays");
    }
    // SAFETY: plain numbers.
    unsafe {
        install(SIGSEGV, handler(), SA_SIGINFO | SA_RESTART, &[])?;
        fail(cx, &p)?;
        same!(siginterrupt(SIGSEGV, 1), 0, "siginterrupt");
        same!(asked(SIGSEGV)?.sa_flags & !RESTORER, SA_SIGINFO, "without SA_RESTART");
        same!(siginterrupt(SIGSEGV, 0), 0, "siginterrupt");
        same!(asked(SIGSEGV)?.sa_flags & !RESTORER, SA_SIGINFO | SA_RESTART, "with it");
    }
    told_of(p.end(1), SIGSEGV, MAPERR)?;
    cx.warm(4, 0)
}

extern "C" {
    fn siginterrupt(sig: c_int, yes: c_int) -> c_int;
}

/// An action as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Action([usize; 4]);

fn raw(sig: c_int, act: Option<&Action>) -> Result<Action, Why> {
    let mut old = Action([0; 4]);
    let act = act.map_or(null(), |a| a as *const Action);
    // SAFETY: null or a record, as large as the kernel's.
    let r = unsafe { libc::syscall(libc::SYS_rt_sigaction, sig, act, &raw mut old, 8) };
    same!(r, 0, "rt_sigaction");
    Ok(old)
}

fn raw_actions(cx: &mut Cx) -> Res {
    let p = Pages::new(1, Bad::Hole)?;
    install(SIGSEGV, handler(), SA_SIGINFO | SA_ONSTACK, &[SIGUSR1])?;
    fail(cx, &p)?;
    let mut k = raw(SIGSEGV, None)?;
    same!(k.0[0], handler(), "asked");
    same!(k.0[1] as c_int & !RESTORER, SA_SIGINFO | SA_ONSTACK, "flags");
    k.0[1] &= !(SA_ONSTACK as usize);
    raw(SIGSEGV, Some(&k))?;
    same!(raw(SIGSEGV, None)?, k, "asked again");
    same!(asked(SIGSEGV)?.sa_sigaction, handler(), "by libc");
    fail(cx, &p)?;
    told_of(p.end(1).wrapping_add(9), SIGSEGV, MAPERR)?;
    cx.warm(4, 0)
}

/// Faults of both kinds in all threads at once.
fn threads(cx: &mut Cx) -> Res {
    install(SIGSEGV, handler(), SA_SIGINFO, &[])?;
    let fd = cx.fd;
    let all: Vec<_> = (0..3)
        .map(|_| {
            std::thread::spawn(move || -> Result<(), String> {
                for i in 0..300 {
                    let p = Pages::new(1, Bad::Shut).map_err(|Why(w)| w)?;
                    for n in [20, 500] {
                        // SAFETY: the kernel answers for bad memory.
                        let r = unsafe { libc::send(fd, p.end(1).cast(), n, libc::MSG_NOSIGNAL) };
                        if (r, sys::errno()) != (-1, EFAULT) {
                            return Err(format!("send: {r}, errno {}", sys::errno()));
                        }
                    }
                    if touch(p.end(1).wrapping_add(i)) != 0 {
                        return Err("what is there".into());
                    }
                }
                Ok(())
            })
        })
        .collect();
    let result = cx.warm(500, 0);
    for t in all {
        t.join().map_err(|_| Why("a thread failed".into()))?.map_err(Why)?;
    }
    same!(COUNT.load(SeqCst), 900, "handlers");
    result
}
