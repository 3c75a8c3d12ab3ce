//! `libringsock.so` takes the place of exactly these libc functions.
//!
//! A symbol too many would change programs behind their back; one too few
//! would let bytes pass by the library, which the program would then miss.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

const INTERPOSED: &str = "
    read __read __read_chk recv __recv_chk recvfrom __recvfrom_chk readv recvmsg recvmmsg preadv2 preadv64v2
    write __write writev send __send sendto sendmsg sendmmsg pwritev2 pwritev64v2
    sendfile sendfile64 splice

    socket socketpair accept accept4 connect __connect shutdown getpeername getsockopt setsockopt
    close __close close_range closefrom dup dup2 __dup2 dup3 fcntl __fcntl fcntl64 ioctl
    open __open open64 __open64 openat openat64 creat creat64 __open_2 __open64_2 __openat_2 __openat64_2
    pipe pipe2 eventfd eventfd_write timerfd_create signalfd inotify_init inotify_init1 memfd_create
    pidfd_open pidfd_getfd fanotify_init
    mkstemp mkstemp64 mkostemp mkostemp64 mkstemps mkstemps64 mkostemps mkostemps64

    poll __poll __poll_chk ppoll __ppoll_chk select __select pselect
    epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2

    sigaction __sigaction signal ssignal bsd_signal sysv_signal __sysv_signal sigset siginterrupt
    pthread_create thrd_create pthread_cancel
    fdopen fclose fopen fopen64 freopen freopen64 tmpfile tmpfile64 popen opendir
    dprintf __dprintf_chk vdprintf __vdprintf_chk aio_read aio_read64 aio_write aio_write64 lio_listio lio_listio64 io_submit

    posix_spawn posix_spawnp posix_spawn_file_actions_init posix_spawn_file_actions_adddup2
    syscall prctl unshare setns setrlimit setrlimit64 getrlimit getrlimit64 prlimit prlimit64 daemon dlopen dlmopen dlsym fork _Fork vfork __vfork clone __clone execve execv execvp execvpe execl execlp execle fexecve execveat
    _exit _Exit quick_exit
";

/// The library that was built with this test: `target/PROFILE/deps/symbols-... -> target/PROFILE/`.
fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    let dir = exe.parent().and_then(|deps| deps.parent()).expect("target/PROFILE/deps");
    let library = dir.join("libringsock.so");
    assert!(library.exists(), "{} is not there: `cargo build --workspace` comes first", library.display());
    library
}

fn symbols(args: &[&str]) -> BTreeSet<String> {
    let out = Command::new("nm").args(args).arg(library()).output().expect("nm, of binutils");
    assert!(out.status.success(), "nm: {}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).expect("names in ASCII");
    // A name may carry its version after an @.
    let name = |line: &str| line.split_whitespace().last().map(|s| s.split('@').next().unwrap_or(s).to_owned());
    text.lines().filter_map(name).collect()
}

#[test]
fn exactly_the_interposed_functions_are_exported() {
    let exported = symbols(&["-D", "--defined-only"]);
    let wanted: BTreeSet<String> = INTERPOSED.split_whitespace().map(str::to_owned).collect();
    let extra: Vec<_> = exported.difference(&wanted).collect();
    let missing: Vec<_> = wanted.difference(&exported).collect();
    assert!(
        extra.is_empty() && missing.is_empty(),
        "exported but not in the list: {extra:?}; in it but not exported: {missing:?}"
    );
}

/// The library is loaded into programs of every kind: it may need libc, and nothing of RDMA.
#[test]
fn nothing_but_libc_is_needed() {
    let out = Command::new("readelf").arg("-d").arg(library()).output().expect("readelf, of binutils");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let needed: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split(['[', ']']).nth(1))
        .filter(|name| !["libc.so.6", "libgcc_s.so.1"].contains(name) && !name.starts_with("ld-linux"))
        .collect();
    assert!(needed.is_empty(), "needs {needed:?}");
}

/// What runs inside a program never calls the program's `malloc`; see `src/heap.rs`. (`free` is named by std's `realpath`.)
#[test]
fn the_programs_allocator_is_not_called() {
    let missing = symbols(&["-D", "--undefined-only"]);
    let of_malloc = ["malloc", "calloc", "realloc", "reallocarray", "memalign", "posix_memalign", "aligned_alloc"];
    let called: Vec<_> = of_malloc.iter().filter(|name| missing.contains(**name)).collect();
    assert!(called.is_empty(), "{called:?}");
}
