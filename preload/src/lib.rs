//! `libringsock.so`: the table of interposed symbols, and nothing else.
//!
//! Every hook asks the core (`ringsock_core::ops`), and does what it says: call
//! the real function, return a value, or fail with an `errno`. Hooks do not
//! allocate, do not panic, keep no state, and leave no frame with anything to
//! drop around the real call or the core's, so that thread cancellation can pass
//! through it.
//!
//! All of it is `unsafe` for one reason: the arguments are the program's, and
//! are used as libc would use them.

#[macro_use]
mod real;
mod clones;
mod fds;
mod io;
mod lookup;
mod plugins;
mod process;
mod signals;
mod stdio;
mod wait;

#[global_allocator]
static HEAP: ringsock_core::heap::Heap = ringsock_core::heap::Heap;

/// Runs when the library is loaded. Constructors of other libraries have run
/// before it and may have called hooks; they found the real functions by
/// themselves, and the core not yet initialised.
extern "C" fn start() {
    real::keep_errno(|| {
        real::resolve_all();
        // SAFETY: called once, before the program's first instruction.
        unsafe { ringsock_core::ops::init() };
        process::watch_forks();
    });
}

/// Runs in `exit`, after the program's own handlers.
extern "C" fn stop() {
    // SAFETY: called once, at the end of the process.
    unsafe { ringsock_core::ops::exiting() };
}

#[used]
#[link_section = ".init_array"]
static START: extern "C" fn() = start;

#[used]
#[link_section = ".fini_array"]
static STOP: extern "C" fn() = stop;
