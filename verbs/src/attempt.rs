//! Listeners, attempts and connections: what librdmacm is asked to do.

use crate::context::{checked, Ctx, Id, RESOLVE_MS};
use crate::ffi::ConnParam;
use crate::host;
use libc::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// ... and repeated so often. 7 would be for ever on some devices.
const RETRIES: u8 = 6;
/// A receiver without receives is waited for without limit (its process may be stopped).
const RNR_RETRIES: u8 = 7;

pub unsafe extern "C" fn listen(
    ctx: *mut c_void,
    addr: *const [u8; 16],
    port: u16,
    token: u64,
    to: *mut *mut c_void,
) -> c_int {
    // SAFETY: as for `event`; the address is readable.
    let (ctx, addr) = unsafe { (&mut *ctx.cast::<Ctx>(), *addr) };
    let Some(addr) = host::reachable(&addr, &ctx.device, ctx.software) else { return libc::EADDRNOTAVAIL };
    let cm = match ctx.new_cm() {
        Ok(cm) => cm,
        Err(e) => return e,
    };
    let mut sa = host::sockaddr(&addr, port);
    // SAFETY: a live id and a valid address.
    let mut r = checked(unsafe { (ctx.lib.rdma_bind_addr)(cm, (&raw mut sa).cast()) });
    // SAFETY: as above.
    if r == 0 && !ctx.allows(unsafe { (*cm).verbs }) {
        r = libc::ENODEV;
    }
    if r == 0 {
        // SAFETY: as above.
        r = checked(unsafe { (ctx.lib.rdma_listen)(cm, 8) });
    }
    if r != 0 {
        // SAFETY: nobody else has the id.
        unsafe { (ctx.lib.rdma_destroy_id)(cm) };
        return r;
    }
    ctx.attend(cm);
    let id = ctx.id(cm, token);
    // SAFETY: the caller's pointer.
    unsafe { to.write(id.cast()) };
    0
}

pub unsafe extern "C" fn own(ctx: *mut c_void, peer: *const [u8; 16], to: *mut [u8; 16]) -> c_int {
    // SAFETY: as for `listen`.
    let (ctx, peer) = unsafe { (&*ctx.cast::<Ctx>(), *peer) };
    let Some(index) = ctx.gid_index else { return libc::ENOENT };
    let peer = host::reachable(&peer, &ctx.device, ctx.software).unwrap_or(peer);
    match host::address_at(index, &peer, &ctx.device, ctx.software) {
        Some(a) => {
            // SAFETY: the caller's array.
            unsafe { to.write(a) };
            0
        }
        None => libc::EADDRNOTAVAIL,
    }
}

pub unsafe extern "C" fn dial(
    ctx: *mut c_void,
    from: *const [u8; 16],
    addr: *const [u8; 16],
    port: u16,
    token: u64,
    to: *mut *mut c_void,
) -> c_int {
    // SAFETY: as for `listen`.
    let (ctx, from, addr) = unsafe { (&mut *ctx.cast::<Ctx>(), *from, *addr) };
    let (Some(from), Some(addr)) =
        (host::reachable(&from, &ctx.device, ctx.software), host::reachable(&addr, &ctx.device, ctx.software))
    else {
        return libc::EADDRNOTAVAIL;
    };
    let cm = match ctx.new_cm() {
        Ok(cm) => cm,
        Err(e) => return e,
    };
    let (mut src, mut dst) = (host::sockaddr(&from, 0), host::sockaddr(&addr, port));
    let id = ctx.id(cm, token);
    let src = if from == [0; 16] { null_mut() } else { (&raw mut src).cast() };
    // SAFETY: a live id and valid addresses; none stands for any.
    let r = checked(unsafe { (ctx.lib.rdma_resolve_addr)(cm, src, (&raw mut dst).cast(), RESOLVE_MS) });
    if r != 0 {
        // SAFETY: nobody else has the id.
        unsafe { close(id.cast()) };
        return r;
    }
    // SAFETY: the caller's pointer.
    unsafe { to.write(id.cast()) };
    0
}

/// A number for a queue pair that there is not. A peer takes two requests of one host with the same number for one that
/// was repeated, so each has its own, far from those that devices begin with.
fn no_qp() -> u32 {
    const HALF: u32 = 1 << 23;
    static LAST: AtomicU32 = AtomicU32::new(0);
    let n = match LAST.load(Relaxed) {
        0 => std::process::id().wrapping_mul(0x9e37_79b9) >> 9,
        n => n + 1,
    } % HALF;
    LAST.store(n.max(1), Relaxed);
    HALF | n
}

/// What both ends ask of the connection.
fn param(private: *const u8, len: u32) -> ConnParam {
    ConnParam {
        private_data: private.cast(),
        private_data_len: len as u8,
        responder_resources: 0,
        initiator_depth: 0,
        flow_control: 0,
        retry_count: RETRIES,
        rnr_retry_count: RNR_RETRIES,
        srq: 0,
        qp_num: 0,
    }
}

pub unsafe extern "C" fn connect(id: *mut c_void, private: *const u8, len: u32) -> c_int {
    // SAFETY: a routed id of ours; the private data is readable.
    unsafe {
        let id = &*id.cast::<Id>();
        let mut param = param(private, len);
        if (*id.cm).qp.is_null() {
            param.qp_num = no_qp();
        }
        checked(((*id.ctx).lib.rdma_connect)(id.cm, &mut param))
    }
}

pub unsafe extern "C" fn accept(id: *mut c_void, private: *const u8, len: u32) -> c_int {
    // SAFETY: as for `connect`.
    unsafe {
        let id = &*id.cast::<Id>();
        checked(((*id.ctx).lib.rdma_accept)(id.cm, &mut param(private, len)))
    }
}

pub unsafe extern "C" fn reject(id: *mut c_void, private: *const u8, len: u32) -> c_int {
    // SAFETY: as for `connect`.
    unsafe {
        let id = &*id.cast::<Id>();
        checked(((*id.ctx).lib.rdma_reject)(id.cm, private.cast(), len as u8))
    }
}

pub unsafe extern "C" fn disconnect(id: *mut c_void) -> c_int {
    // SAFETY: an open id of ours.
    unsafe {
        let id = &*id.cast::<Id>();
        checked(((*id.ctx).lib.rdma_disconnect)(id.cm))
    }
}

pub unsafe extern "C" fn close(id: *mut c_void) {
    // SAFETY: the caller's promise: nobody uses it any more.
    let id = unsafe { Box::from_raw(id.cast::<Id>()) };
    // SAFETY: the context outlives its ids; only the background thread closes.
    let ctx = unsafe { &mut *id.ctx };
    ctx.open.retain(|p| !std::ptr::eq(*p, &*id));
    ctx.ids.retain(|p| !std::ptr::eq(*p, &*id));
    let me: *const Id = &*id;
    ctx.queue.retain(|e| !std::ptr::eq(e.id.cast::<Id>(), me));
    // SAFETY: everything was made by `open` and `register`, and goes in the reverse order.
    unsafe {
        (*id.cm).context = null_mut();
        if !(*id.cm).qp.is_null() {
            (ctx.lib.rdma_destroy_qp)(id.cm);
        }
        if !id.cq.is_null() {
            (ctx.lib.ibv_destroy_cq)(id.cq);
        }
        for mr in &id.memory {
            (ctx.lib.ibv_dereg_mr)(*mr);
        }
        if !id.pd.is_null() {
            (ctx.lib.ibv_dealloc_pd)(id.pd);
        }
        if !id.dev.is_null() {
            ctx.drop_dev(id.dev);
        }
        (ctx.lib.rdma_destroy_id)(id.cm);
    }
    ctx.let_go();
}
