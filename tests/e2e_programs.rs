//! Programs that are not about sockets do the same preloaded as without: output, error output and
//! status are equal. Each script looks whether the library really is mapped.

mod common;

use common::*;
use std::path::Path;

/// Whether a program is installed.
fn installed(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|p| std::env::split_paths(&p).any(|d| d.join(name).is_file()))
}

/// Notes that the library is mapped where the script runs.
const LOADED: &str = "grep -c libringsock.so /proc/self/maps >../loaded || true; ";

/// Runs a shell script in a folder of its own, plain and preloaded, and compares.
#[track_caller]
fn same(program: &str, script: &str) {
    let _one = one_at_a_time();
    if !installed(program) {
        skip(&format!("{program} is not installed"));
        return;
    }
    let run = |preloaded: bool| -> (Option<i32>, String, String, u32) {
        let place = Place::new("programs");
        let dir = place.path("work");
        std::fs::create_dir(&dir).expect("folder");
        let mut cmd = plain_command("bash");
        cmd.args(["-c", &format!("{LOADED}{script}")]).current_dir(&dir).env("LC_ALL", "C").env("HOME", &dir);
        if preloaded && !dry() {
            place.preload(&mut cmd);
            // Whatever the library says goes where it can be seen.
            cmd.env_remove("RINGSOCK_LOG");
        }
        let end = Proc::start(&place, cmd).wait(90.0);
        let hide = |s: &str| s.replace(&*dir.to_string_lossy(), "DIR");
        let loaded = std::fs::read_to_string(place.path("loaded")).unwrap_or_default();
        (end.code, hide(&end.out), hide(&end.err), loaded.trim().parse().unwrap_or(0))
    };
    let (plain, loaded) = (run(false), run(true));
    assert_eq!(plain.0, Some(0), "{program} fails without the preload: {plain:?}");
    assert!(!plain.1.is_empty(), "{program} printed nothing");
    assert_eq!((plain.0, &plain.1, &plain.2), (loaded.0, &loaded.1, &loaded.2), "{program} differs");
    assert!(dry() || (plain.3 == 0 && loaded.3 > 0), "{program}: the library was not loaded");
}

#[test]
fn bash() {
    same(
        "bash",
        r#"
        set -euo pipefail
        declare -A m; for i in {1..300}; do m[k$i]=$((i * i)); done; echo "${#m[@]} ${m[k17]}"
        seq 1 20000 | sort -rn | tail -n 3 | tr '\n' ' '; echo
        diff <(seq 1 10) <(seq 1 10) && echo same
        cat <<X | while read -r a b; do echo "$b $a"; done
one two
three four
X
        exec 7<>fifo.txt; echo hello >&7; exec 7>&-; cat fifo.txt
        for i in 1 2 3 4 5; do (sleep 0.0$i; echo "job $i" >job.$i) & done; wait; cat job.*
        coproc CAT { cat; }; echo through >&"${CAT[1]}"; eval "exec ${CAT[1]}>&-"; read -r x <&"${CAT[0]}"; echo "$x"
        trap 'echo trapped' USR1; kill -USR1 $$; (exit 3) || echo "status $?"
        for i in {1..60}; do /bin/true; done; timeout 0.1 sleep 5 || echo "timeout $?"
        ulimit -n 64; for i in {1..20}; do x=$(echo $i); done; echo "$x"
        set +o pipefail; yes | head -n 100000 | sha256sum
        "#,
    );
}

#[test]
fn tar() {
    same(
        "tar",
        r#"
        set -euo pipefail
        mkdir -p tree/a/b; for i in {1..200}; do seq 1 $((i * 7)) >tree/a/b/f$i; done
        ln -s f1 tree/a/b/link; mkfifo tree/pipe
        tar --sort=name --mtime=@0 --owner=0 --group=0 -cf - tree | sha256sum
        tar --sort=name --mtime=@0 -czf t.tgz tree; mkdir out; tar -xzf t.tgz -C out
        diff -r --no-dereference tree/a out/tree/a && echo equal
        tar -tzf t.tgz | sort | sha256sum
        (cd tree && tar -cf - .) | (mkdir copy && cd copy && tar -xf -); find copy -type f | wc -l
        "#,
    );
}

#[test]
fn gcc() {
    same(
        "gcc",
        r#"
        set -euo pipefail
        cat >a.c <<X
#include <pthread.h>
#include <stdio.h>
static void *f(void *p) { long *n = p; for (int i = 0; i < 100000; i++) *n += i % 7; return 0; }
int main(void) {
    pthread_t t[4]; long n[4] = {0};
    for (int i = 0; i < 4; i++) pthread_create(&t[i], 0, f, &n[i]);
    for (int i = 0; i < 4; i++) pthread_join(t[i], 0);
    printf("%ld %ld\n", n[0], n[3]); return 0; }
X
        gcc -O2 -pipe -Wall -o a a.c -lpthread; ./a
        gcc -O2 -S -o - a.c | grep -v '^\s*\.' | sha256sum
        gcc -static -o s a.c -lpthread 2>/dev/null && ./s || echo "no static libc"
        echo 'int x = "a";' >bad.c; gcc -c bad.c || echo "status $?"
        "#,
    );
}

/// Another library that interposes the same functions sees every call, whether it is preloaded before ours or after it.
#[test]
fn another_preloaded_library() {
    same(
        "gcc",
        r#"
        set -euo pipefail
        cat >other.c <<X
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
static int n;
ssize_t read(int fd, void *to, size_t len) {
    n++;
    return ((ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read"))(fd, to, len);
}
__attribute__((destructor)) static void end(void) { fprintf(stderr, "%d reads\n", n); }
X
        cat >user.c <<X
#include <fcntl.h>
#include <unistd.h>
int main(void) { char c; int fd = open("/dev/zero", O_RDONLY); for (int i = 0; i < 100; i++) read(fd, &c, 1); return 0; }
X
        gcc -w -shared -fPIC -o other.so other.c -ldl; gcc -w -o user user.c
        LD_PRELOAD="${LD_PRELOAD:-} $PWD/other.so" ./user
        LD_PRELOAD="$PWD/other.so ${LD_PRELOAD:-}" ./user
        # One that does not ask for the next function but for libc's own.
        sed 's/dlsym(RTLD_NEXT/dlsym(dlopen("libc.so.6", RTLD_LAZY)/' other.c >byname.c
        gcc -w -shared -fPIC -o byname.so byname.c -ldl
        LD_PRELOAD="${LD_PRELOAD:-} $PWD/byname.so" ./user
        LD_PRELOAD="$PWD/byname.so ${LD_PRELOAD:-}" ./user
        LD_PRELOAD="$PWD/byname.so ${LD_PRELOAD:-} $PWD/other.so" ./user
        # The program itself has such a function.
        gcc -w -rdynamic -o both byname.c user.c -ldl; ./both
        echo done
        "#,
    );
}

/// A program of one thread that brings a `malloc` of its own: no other thread of its process may call that (but while the
/// program itself waits for that thread to begin), and what is hooked may be called by a handler that came within it.
#[test]
fn a_malloc_that_knows_no_threads() {
    same(
        "gcc",
        r#"
        set -euo pipefail
        cat >own.c <<X
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
static char heap[64 << 20];
static size_t used;
static volatile int within, armed, strict;
static int fds[2], sets[64], nsets, handled;
static void die(const char *why) { if (write(2, why, strlen(why))) {} _exit(3); }
static void *get(size_t n, size_t align) {
    if (strict && syscall(SYS_gettid) != getpid()) die("another thread calls malloc\n");
    if (strict && within) die("malloc within malloc\n");
    if (align < 16) align = 16;
    within = 1;
    size_t at = (used + 16 + align - 1) / align * align;
    if (armed) { armed = 0; raise(SIGUSR1); }
    if (at + n > sizeof heap) die("the heap is full\n");
    used = at + n;
    *(size_t *)(heap + at - 16) = n;
    within = 0;
    return heap + at; }
void *malloc(size_t n) { return get(n, 16); }
void *calloc(size_t a, size_t b) { return get(a * b, 16); }
void *memalign(size_t align, size_t n) { return get(n, align); }
void *aligned_alloc(size_t align, size_t n) { return get(n, align); }
int posix_memalign(void **to, size_t align, size_t n) { *to = get(n, align); return 0; }
void *realloc(void *old, size_t n) {
    void *to = get(n, 16);
    if (old) { size_t had = ((size_t *)old)[-2]; memcpy(to, old, had < n ? had : n); }
    return to; }
void free(void *p) { if (strict && p && syscall(SYS_gettid) != getpid()) die("another thread calls free\n"); }
static void pass(const char *text, size_t n) {
    char got[256];
    if (write(fds[0], text, n) != (ssize_t)n) die("write\n");
    for (size_t have = 0; have < n;) {
        ssize_t r = read(fds[1], got + have, n - have);
        if (r <= 0) die("read\n");
        have += r; }
    if (memcmp(got, text, n)) die("other bytes\n"); }
static void handler(int s) {
    struct pollfd p[200];
    for (int i = 0; i < 200; i++) p[i] = (struct pollfd){fds[i % 2], POLLIN | POLLOUT, 0};
    int n = poll(p, 200, 0);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT};
    int c = epoll_ctl(sets[nsets], EPOLL_CTL_ADD, fds[0], &ev), w = epoll_wait(sets[nsets], &ev, 1, 0);
    fd_set set; FD_ZERO(&set); FD_SET(fds[1], &set);
    struct timeval now = {0};
    int e = select(fds[1] + 1, &set, 0, 0, &now);
    pass("from a handler", 14);
    if (n != 200 || c || w != 1 || ev.events != EPOLLOUT || e) die("the handler sees something else\n");
    nsets++; handled++; }
int main(void) {
    struct sockaddr_in a = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(l, (void *)&a, len) || listen(l, 1) || getsockname(l, (void *)&a, &len)) die("listen\n");
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fds[0], (void *)&a, len)) die("connect\n");
    fds[1] = accept(l, 0, 0);
    for (int i = 0; i < 64; i++) sets[i] = epoll_create1(0);
    signal(SIGUSR1, handler);
    char text[200];
    for (int i = 0; i < 4000; i++) {
        memset(text, i, sizeof text);
        pass(text, 1 + i % sizeof text);
        if (i % 50 == 0) usleep(1000);
        if (i == 200) strict = 1;
        if (i >= 400 && i % 50 == 0 && nsets < 64) { armed = 1; free(malloc(1 + i)); } }
    printf("%d times in a handler\n", handled);
    return 0; }
X
        gcc -w -fno-builtin -o own own.c
        RINGSOCK_REPORT=$PWD/report.%p ./own
        [ -z "${LD_PRELOAD:-}" ] || grep -q '"upgraded":2' report.*
        "#,
    );
}

/// Pointers for which the kernel says `EFAULT`, in a program that has no TCP socket.
#[test]
fn bad_pointers() {
    same(
        "gcc",
        r#"
        set -euo pipefail
        cat >bad.c <<X
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#define SAY(call) do { errno = 0; long r = (call); printf("%s = %ld, errno %d\n", #call, r, errno); } while (0)
int main(void) {
    void *bad = mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int u[2], ep = epoll_create1(0), udp = socket(AF_INET, SOCK_DGRAM, 0);
    socketpair(AF_UNIX, SOCK_STREAM, 0, u);
    fd_set none; FD_ZERO(&none); FD_SET(u[0], &none);
    struct timeval zero = {0}; struct timespec zs = {0};
    struct pollfd p = {u[0], POLLIN, 0}; struct epoll_event ev;
    SAY(select(u[0] + 1, bad, 0, 0, &zero));
    SAY(pselect(u[0] + 1, 0, bad, 0, &zs, 0));
    SAY(syscall(SYS_pselect6, u[0] + 1, &none, 0, 0, bad, 0));
    SAY(syscall(SYS_ppoll, &p, 1, bad, 0, 8));
    SAY(poll(bad, 1, 0));
    SAY(epoll_wait(ep, bad, 1, 0));
    SAY(epoll_ctl(ep, EPOLL_CTL_ADD, u[0], bad));
    char c = 'x'; struct iovec iov = {&c, 1};
    struct msghdr m = {0}; m.msg_iov = &iov; m.msg_iovlen = 1;
    m.msg_control = bad; m.msg_controllen = 64;
    SAY(sendmsg(u[0], &m, 0));
    SAY(sendmsg(u[0], bad, 0));
    SAY(recvmsg(u[1], bad, MSG_DONTWAIT));
    SAY(sendmmsg(udp, bad, 1, 0));
    SAY(recvmmsg(udp, bad, 1, MSG_DONTWAIT, 0));
    struct mmsghdr mm = {0};
    SAY(syscall(SYS_recvmmsg, udp, &mm, 1, MSG_DONTWAIT, bad));
    return 0; }
X
        gcc -w -o bad bad.c; ./bad
        "#,
    );
}

#[test]
fn git() {
    same(
        "git",
        r#"
        set -euo pipefail
        export GIT_AUTHOR_DATE='2024-01-01T00:00:00Z' GIT_COMMITTER_DATE='2024-01-01T00:00:00Z'
        export GIT_CONFIG_NOSYSTEM=1
        git config --global user.name t; git config --global user.email t@example.org
        git config --global init.defaultBranch main; git config --global protocol.file.allow always
        git init -q r; cd r
        for i in {1..25}; do seq $i 300 >f$i; git add .; git commit -qm "c$i"; done
        git log --format=%H | sha256sum; git gc -q; git fsck --strict 2>/dev/null; git status --short | wc -l
        cd ..; git clone -q file://$PWD/r c; cd c; git checkout -q -b side HEAD~5
        echo x >x; git add x; git commit -qm side; git rebase -q main; git rev-parse HEAD
        git diff --stat main | tail -n 1; git push -q origin side; git ls-remote origin | cut -f2
        "#,
    );
}

#[test]
fn python() {
    same(
        "python3",
        r#"
        cat >p.py <<X
import asyncio, hashlib, json, multiprocessing, os, select, socket, subprocess, tempfile, threading

def square(n):
    return n * n

def main():
    print(hashlib.sha256(json.dumps(list(range(10000))).encode()).hexdigest())
    out = []
    ts = [threading.Thread(target=lambda i=i: out.append(i)) for i in range(20)]
    [t.start() for t in ts]; [t.join() for t in ts]
    print(sorted(out))
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(3) as p:
            print(p.map(square, range(12)))
    print(subprocess.run(["cat"], input=b"x" * 200000, capture_output=True).stdout[-3:])
    a, b = socket.socketpair()
    p = select.poll(); p.register(b, select.POLLIN)
    print(p.poll(0)); a.send(b"hi"); print([e for _, e in p.poll(1000)], b.recv(10)); a.close(); print(b.recv(10))
    r, w = os.pipe()
    e = select.epoll(); e.register(r, select.EPOLLIN | select.EPOLLET); os.write(w, b"z")
    print(len(e.poll(1)), len(e.poll(0)), os.read(r, 9))
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    async def work():
        q = await asyncio.create_subprocess_exec("echo", "async", stdout=asyncio.subprocess.PIPE)
        o, _ = await q.communicate()
        await asyncio.gather(*(asyncio.sleep(0.01) for _ in range(50)))
        return o
    print(asyncio.run(work()))
    with tempfile.TemporaryFile() as f, open(__file__, "rb") as g:
        print(os.sendfile(f.fileno(), g.fileno(), 0, 100), os.dup2(g.fileno(), 77), os.close(77))
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 0)); u.sendto(b"dgram", u.getsockname())
    print(u.recvfrom(100)[0])
    try:
        socket.create_connection(("127.0.0.1", 1), timeout=2)
    except OSError as x:
        print(type(x).__name__, x.errno)

if __name__ == "__main__":
    main()
X
        python3 p.py
        "#,
    );
}

#[test]
fn node() {
    same(
        "node",
        r#"
        cat >p.js <<X
const { execFileSync, spawn } = require('child_process');
const fs = require('fs'), crypto = require('crypto'), { Worker } = require('worker_threads');
(async () => {
  console.log(crypto.createHash('sha256').update('x'.repeat(1e6)).digest('hex'));
  fs.writeFileSync('a.txt', 'hello'); console.log((await fs.promises.readFile('a.txt')).toString());
  console.log(execFileSync('echo', ['child']).toString().trim());
  const c = spawn('cat'); c.stdin.end('piped'.repeat(1000)); let n = 0;
  for await (const d of c.stdout) n += d.length;
  console.log(n);
  console.log(await new Promise(r => new Worker("require('worker_threads').parentPort.postMessage(6*7)", { eval: true }).on('message', r)));
  await Promise.all(Array.from({ length: 50 }, (_, i) => new Promise(r => setTimeout(r, i % 7))));
  fs.createReadStream('p.js').pipe(fs.createWriteStream('q.js')).on('close', () => console.log(fs.statSync('q.js').size > 500));
})();
X
        node p.js
        "#,
    );
}

#[test]
fn java() {
    let compiler = Path::new("javac");
    if !installed("javac") {
        // Only a runtime: its version, and its settings, are something.
        return same("java", "java -Xshare:auto -version 2>&1; java -XshowSettings:locale -version 2>&1 | head -n 3");
    }
    let script = format!(
        r#"
        set -euo pipefail
        cat >P.java <<X
import java.nio.file.*; import java.util.*; import java.util.concurrent.*; import java.util.stream.*;
public class P {{
    public static void main(String[] a) throws Exception {{
        ExecutorService e = Executors.newFixedThreadPool(8);
        List<Future<Long>> f = new ArrayList<>();
        for (int i = 0; i < 50; i++) {{ final int n = i; f.add(e.submit(() -> LongStream.range(0, 1000 * n).sum())); }}
        long s = 0; for (Future<Long> x : f) s += x.get(); e.shutdown(); System.out.println(s);
        Path p = Files.writeString(Path.of("j.txt"), "text"); System.out.println(Files.readString(p));
        Process q = new ProcessBuilder("echo", "child").redirectErrorStream(true).start();
        System.out.println(new String(q.getInputStream().readAllBytes()).trim() + q.waitFor());
        System.out.println(IntStream.range(0, 100000).parallel().filter(x -> x % 3 == 0).count());
    }}
}}
X
        {} P.java; java -XX:TieredStopAtLevel=1 P
        "#,
        compiler.display()
    );
    same("java", &script);
}
