//! `libringsock_verbs.so`: what ringsock needs of libibverbs and librdmacm, as a table of C functions.
//!
//! It knows nothing of connections or rings: it finds ways to peers, makes queue pairs, registers
//! memory, posts writes and tells of completions. See `ringsock_core::provider` for the contract.

mod attempt;
mod context;
mod driver;
mod ffi;
mod host;
mod queue;

use ffi::Lib;
use libc::{c_char, c_int};
use ringsock_core::provider::{self, Api};

#[global_allocator]
static HEAP: ringsock_core::heap::Heap = ringsock_core::heap::Heap;

static TABLE: Api = Api {
    version: provider::VERSION,
    start: context::start,
    fd: context::fd,
    event: context::event,
    listen: attempt::listen,
    own: attempt::own,
    dial: attempt::dial,
    open: queue::open,
    channel: queue::channel,
    direct: queue::direct,
    heard: queue::heard,
    register: queue::register,
    forget: queue::forget,
    connect: attempt::connect,
    accept: attempt::accept,
    reject: attempt::reject,
    disconnect: attempt::disconnect,
    close: attempt::close,
    post: queue::post,
    post_recv: queue::post_recv,
    poll: queue::poll,
    arm: queue::arm,
    way,
    describe,
};

/// The table of functions.
#[no_mangle]
pub extern "C" fn ringsock_verbs_api() -> *const Api {
    &TABLE
}

/// Loads the RDMA libraries, and the drivers of this host's devices. The error is what is missing.
fn load() -> Result<Lib, &'static str> {
    let lib = Lib::load()?;
    driver::load(lib.ibv_get_device_list as *const libc::c_void);
    Ok(lib)
}

unsafe extern "C" fn way(addr: *const [u8; 16], to: *mut c_char, len: *mut usize) -> c_int {
    let text = match load() {
        // SAFETY: the caller's address.
        Ok(lib) => host::way(&lib, unsafe { &*addr }),
        Err(_) => Err(libc::ENOENT),
    };
    let text = match text {
        Ok(t) => t,
        Err(e) => return e,
    };
    // SAFETY: the caller's buffer and its length.
    unsafe {
        *len = text.len().min(*len);
        core::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), *len);
    }
    0
}

unsafe extern "C" fn describe(to: *mut c_char, len: usize) -> usize {
    let text = match load() {
        Ok(lib) => host::describe(&lib),
        Err(e) => e.to_string(),
    };
    let n = text.len().min(len);
    // SAFETY: the caller's buffer.
    unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), n) };
    n
}
