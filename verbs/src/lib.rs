//! `libringsock_verbs.so`: what ringsock needs of libibverbs and librdmacm, as a table of C functions.
//!
//! It knows nothing of connections or rings: it finds ways to peers, makes queue pairs, registers
//! memory, posts writes and tells of completions. See `ringsock_core::provider` for the contract.

mod ffi;
mod host;

use ffi::{cm, CmChannel, CmId, CompChannel, ConnParam, Context, Cq, Lib, Mr, Pd, QpCap, QpInitAttr, RecvWr, SendWr};
use ffi::{Sge, Wc};
use libc::{c_char, c_int, c_void};
use ringsock_core::provider::{self, Api, Channel, Done, Event, Limits, Memory, Options, What, Write};
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

static TABLE: Api = Api {
    version: provider::VERSION,
    start,
    fd,
    event,
    listen,
    dial,
    open,
    channel,
    heard,
    register,
    forget,
    connect,
    accept,
    reject,
    disconnect,
    close,
    post,
    post_recv,
    poll,
    arm,
    way,
    describe,
};

/// The table of functions.
#[no_mangle]
pub extern "C" fn ringsock_verbs_api() -> *const Api {
    &TABLE
}

/// How long the search for a way to the peer may take, in ms.
const RESOLVE_MS: c_int = 1000;
/// A lost packet is noticed after 4.096 µs times 2 to this power (67 ms) ...
const ACK_TIMEOUT: u8 = 14;
/// ... and repeated so often. 7 would be for ever on some devices.
const RETRIES: u8 = 6;
/// A receiver without receives is waited for without limit (its process may be stopped).
const RNR_RETRIES: u8 = 7;

/// A device in use.
struct Dev {
    verbs: *mut Context,
    /// A box of its own, which outlives this.
    ear: *mut Ear,
    users: u32,
}

/// A completion channel, for threads that know nothing else of the provider.
struct Ear {
    channel: *mut CompChannel,
    get: unsafe extern "C" fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int,
    ack: unsafe extern "C" fn(*mut Cq, libc::c_uint),
}

/// The provider's state.
struct Ctx {
    lib: Lib,
    cm: *mut CmChannel,
    epfd: c_int,
    /// In boxes, because ids point to them.
    #[allow(clippy::vec_box)]
    devs: Vec<Box<Dev>>,
    device: String,
    software: bool,
    gid_index: Option<u32>,
    place: extern "C" fn(c_int) -> c_int,
    release: extern "C" fn(c_int),
    /// Command fds of contexts whose fds have their places.
    placed: Vec<c_int>,
    queue: VecDeque<Event>,
    /// Queue pairs, for events that name a completion queue or nothing.
    open: Vec<*mut Id>,
    /// All that are not closed.
    ids: Vec<*mut Id>,
    gone: Vec<Gone>,
}

/// A device that is being removed. The kernel waits with that until nobody has it open any more, if the device's
/// driver knows no better (rxe), and librdmacm would keep it open.
struct Gone {
    verbs: *mut Context,
    cmd_fd: c_int,
    async_fd: c_int,
    /// What `cmd_fd` was.
    number: libc::dev_t,
}

/// Which device file an fd is.
fn device_of(fd: c_int) -> Option<libc::dev_t> {
    let mut st = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: written before it is read.
    unsafe { (libc::fstat(fd, st.as_mut_ptr()) == 0).then(|| st.assume_init().st_rdev) }
}

/// A listener, an attempt, or a connection.
struct Id {
    ctx: *mut Ctx,
    cm: *mut CmId,
    token: u64,
    dev: *mut Dev,
    pd: *mut Pd,
    cq: *mut Cq,
    memory: Vec<*mut Mr>,
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO).max(1)
}

/// 0, or what errno says.
fn checked(r: c_int) -> c_int {
    if r == 0 {
        0
    } else {
        errno()
    }
}

fn nonblocking(fd: c_int) {
    // SAFETY: an fd of ours.
    unsafe {
        let f = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, f | libc::O_NONBLOCK);
        libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
    }
}

impl Ctx {
    fn watch(&self, fd: c_int) {
        let mut ev = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        nonblocking(fd);
        // SAFETY: our own fds.
        unsafe { libc::epoll_ctl(self.epfd, libc::EPOLL_CTL_ADD, fd, &mut ev) };
    }

    fn unwatch(&self, fd: c_int) {
        // SAFETY: our own fds.
        unsafe { libc::epoll_ctl(self.epfd, libc::EPOLL_CTL_DEL, fd, null_mut()) };
    }

    fn name_of(&self, verbs: *mut Context) -> String {
        // SAFETY: a live context; the name lives as long as the device.
        unsafe {
            let p = (self.lib.ibv_get_device_name)((*verbs).device);
            if p.is_null() {
                String::new()
            } else {
                core::ffi::CStr::from_ptr(p).to_string_lossy().into_owned()
            }
        }
    }

    /// Whether a device may be used.
    fn allows(&self, verbs: *mut Context) -> bool {
        !verbs.is_null() && host::allowed(&self.name_of(verbs), &self.device, self.software)
    }

    fn id(&mut self, cm: *mut CmId, token: u64) -> *mut Id {
        let id = Box::into_raw(Box::new(Id {
            ctx: self,
            cm,
            token,
            dev: null_mut(),
            pd: null_mut(),
            cq: null_mut(),
            memory: Vec::new(),
        }));
        // SAFETY: a live id of librdmacm.
        unsafe { (*cm).context = id.cast() };
        self.ids.push(id);
        id
    }

    fn new_cm(&mut self) -> Result<*mut CmId, c_int> {
        let mut cm = null_mut();
        // SAFETY: the channel lives as long as the provider.
        match checked(unsafe { (self.lib.rdma_create_id)(self.cm, &mut cm, null_mut(), ffi::PS_TCP) }) {
            0 => Ok(cm),
            e => Err(e),
        }
    }

    /// The device of `verbs`, noted as used once more.
    fn use_dev(&mut self, verbs: *mut Context) -> Option<*mut Dev> {
        if let Some(d) = self.devs.iter_mut().find(|d| d.verbs == verbs) {
            d.users += 1;
            return Some(&mut **d);
        }
        // SAFETY: a live context.
        let channel = unsafe { (self.lib.ibv_create_comp_channel)(verbs) };
        if channel.is_null() {
            return None;
        }
        // SAFETY: both are live. The libraries use the numbers in these structures, which are public.
        unsafe {
            (*channel).fd = (self.place)((*channel).fd);
            if !self.placed.contains(&(*verbs).cmd_fd) {
                (*verbs).cmd_fd = (self.place)((*verbs).cmd_fd);
                (*verbs).async_fd = (self.place)((*verbs).async_fd);
                self.placed.push((*verbs).cmd_fd);
            }
            nonblocking((*channel).fd);
            self.watch((*verbs).async_fd);
        }
        let ear = Ear { channel, get: self.lib.ibv_get_cq_event, ack: self.lib.ibv_ack_cq_events };
        self.devs.push(Box::new(Dev { verbs, ear: Box::into_raw(Box::new(ear)), users: 1 }));
        self.devs.last_mut().map(|d| &mut **d as *mut Dev)
    }

    fn drop_dev(&mut self, dev: *mut Dev) {
        let Some(i) = self.devs.iter().position(|d| std::ptr::eq(&**d, dev)) else { return };
        self.devs[i].users -= 1;
        if self.devs[i].users == 0 {
            let d = self.devs.remove(i);
            // SAFETY: a live context.
            self.unwatch(unsafe { (*d.verbs).async_fd });
            // SAFETY: no queue pair uses the channel, and by the contract no thread hears of it any more.
            unsafe {
                let ear = Box::from_raw(d.ear);
                (self.release)((*ear.channel).fd);
                (self.lib.ibv_destroy_comp_channel)(ear.channel);
            }
        }
    }

    /// The device of `verbs` is being removed.
    fn goes(&mut self, verbs: *mut Context) {
        if verbs.is_null() || self.gone.iter().any(|g| g.verbs == verbs) {
            return;
        }
        // SAFETY: a live context: librdmacm keeps it at least as long as the id that the event was for.
        let (cmd_fd, async_fd) = unsafe { ((*verbs).cmd_fd, (*verbs).async_fd) };
        if let Some(number) = device_of(cmd_fd) {
            self.gone.push(Gone { verbs, cmd_fd, async_fd, number });
        }
    }

    /// Puts something else in the place of the files of devices that are being removed and that nothing uses any more.
    fn let_go(&mut self) {
        // SAFETY: ids in the list are live.
        let used = |v: *mut Context, ids: &[*mut Id]| ids.iter().any(|id| unsafe { (*(**id).cm).verbs } == v);
        for g in self.gone.extract_if(.., |g| !used(g.verbs, &self.ids)) {
            self.placed.retain(|fd| *fd != g.cmd_fd);
            // librdmacm may have closed it by itself, and the number be somebody else's.
            if device_of(g.cmd_fd) != Some(g.number) {
                continue;
            }
            // SAFETY: fds of the context's, which only fails calls from now on.
            unsafe {
                let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                for fd in [g.cmd_fd, g.async_fd] {
                    (self.release)(fd);
                    libc::dup3(null, fd, libc::O_CLOEXEC);
                }
                libc::close(null);
            }
        }
    }

    /// Reads everything that the kernel has to tell.
    fn gather(&mut self) {
        self.gather_cm();
        for i in 0..self.devs.len() {
            let verbs = self.devs[i].verbs;
            loop {
                let mut ev = ffi::AsyncEvent { element: null_mut(), event_type: 0 };
                // SAFETY: a live context whose fd does not block.
                if unsafe { (self.lib.ibv_get_async_event)(verbs, &mut ev) } != 0 {
                    break;
                }
                let of_qp = matches!(ev.event_type, ffi::EVENT_QP_FATAL | ffi::EVENT_QP_ACCESS_ERR);
                let fatal = ev.event_type == ffi::EVENT_DEVICE_FATAL;
                for id in &self.open {
                    // SAFETY: ids in the list are live.
                    let (id, qp) = unsafe { (&**id, (*(**id).cm).qp) };
                    let hit =
                        if of_qp { qp.cast() == ev.element } else { fatal && std::ptr::eq(id.dev, &*self.devs[i]) };
                    if hit {
                        self.queue.push_back(Event {
                            what: What::Lost,
                            token: id.token,
                            status: 1,
                            ..Event::default()
                        });
                    }
                }
                // SAFETY: the event was got above.
                unsafe { (self.lib.ibv_ack_async_event)(&mut ev) };
            }
        }
    }

    fn gather_cm(&mut self) {
        loop {
            let mut raw = null_mut();
            // SAFETY: the channel does not block.
            if unsafe { (self.lib.rdma_get_cm_event)(self.cm, &mut raw) } != 0 {
                return;
            }
            // SAFETY: librdmacm's event is valid until it is acknowledged; private data has the length that it says.
            let (kind, status, cm_id, listener, private) = unsafe {
                let e = &*raw;
                let has = matches!(e.event, cm::CONNECT_REQUEST | cm::ESTABLISHED | cm::REJECTED);
                let private = if has && !e.conn.private_data.is_null() {
                    std::slice::from_raw_parts(e.conn.private_data.cast::<u8>(), e.conn.private_data_len.into())
                        .to_vec()
                } else {
                    Vec::new()
                };
                (e.event, e.status, e.id, e.listen_id, private)
            };
            // SAFETY: as above. It is acknowledged before anything is destroyed.
            unsafe { (self.lib.rdma_ack_cm_event)(raw) };
            let mut ev = Event { status, private_len: private.len().min(provider::PRIVATE) as u32, ..Event::default() };
            ev.private[..ev.private_len as usize].copy_from_slice(&private[..ev.private_len as usize]);
            if kind == cm::CONNECT_REQUEST {
                self.request(cm_id, listener, ev);
                continue;
            }
            // SAFETY: an id of ours, with our record in its context, until `close`, which destroys both.
            let Some(id) = (unsafe { (*cm_id).context.cast::<Id>().as_ref() }) else { continue };
            (ev.id, ev.token) = ((id as *const Id).cast_mut().cast(), id.token);
            ev.what = match kind {
                cm::ADDR_RESOLVED => {
                    // SAFETY: a live id that has an address.
                    let ok =
                        unsafe { self.allows((*cm_id).verbs) && (self.lib.rdma_resolve_route)(cm_id, RESOLVE_MS) == 0 };
                    if ok {
                        continue;
                    }
                    What::Unreachable
                }
                cm::ROUTE_RESOLVED => What::Routed,
                cm::ESTABLISHED => What::Established,
                cm::REJECTED => What::Rejected,
                cm::ADDR_ERROR | cm::ROUTE_ERROR | cm::CONNECT_ERROR | cm::UNREACHABLE => What::Unreachable,
                cm::DISCONNECTED => What::Lost,
                cm::DEVICE_REMOVAL => {
                    // SAFETY: a live id.
                    self.goes(unsafe { (*cm_id).verbs });
                    What::Lost
                }
                _ => continue,
            };
            self.queue.push_back(ev);
        }
    }

    fn request(&mut self, cm_id: *mut CmId, listener: *mut CmId, mut ev: Event) {
        // SAFETY: both are live ids of librdmacm; a listener of ours has our record.
        unsafe {
            let l = (*listener).context.cast::<Id>().as_ref();
            let (Some(l), true) = (l, self.allows((*cm_id).verbs)) else {
                (self.lib.rdma_reject)(cm_id, null_mut(), 0);
                (self.lib.rdma_destroy_id)(cm_id);
                return;
            };
            ev.what = What::Request;
            ev.listener = l.token;
            ev.from = host::octets(&(*cm_id).dst);
        }
        ev.id = self.id(cm_id, 0).cast();
        self.queue.push_back(ev);
    }
}

unsafe extern "C" fn start(o: *mut Options) -> *mut c_void {
    // SAFETY: the core gives a valid structure.
    let o = unsafe { &mut *o };
    let mut fail = |text: &str| {
        for (to, b) in o.why.iter_mut().zip(text.bytes().take(127).chain([0])) {
            *to = b as c_char;
        }
        null_mut()
    };
    let lib = match Lib::load() {
        Ok(l) => l,
        Err(why) => return fail(why),
    };
    // SAFETY: no preconditions.
    let (channel, epfd) = unsafe { ((lib.rdma_create_event_channel)(), libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
    if channel.is_null() || epfd < 0 {
        return fail(&format!("librdmacm cannot start: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: NUL-terminated by the contract.
    let device = unsafe { core::ffi::CStr::from_ptr(o.device.as_ptr()) }.to_string_lossy().into_owned();
    // SAFETY: a live channel. librdmacm uses the number in this structure, which is public.
    let epfd = unsafe {
        (*channel).fd = (o.place)((*channel).fd);
        (o.place)(epfd)
    };
    let ctx = Box::new(Ctx {
        lib,
        cm: channel,
        epfd,
        place: o.place,
        release: o.release,
        placed: Vec::new(),
        devs: Vec::new(),
        device,
        software: o.software != 0,
        gid_index: u32::try_from(o.gid_index).ok(),
        queue: VecDeque::new(),
        open: Vec::new(),
        ids: Vec::new(),
        gone: Vec::new(),
    });
    // SAFETY: a live channel.
    ctx.watch(unsafe { (*channel).fd });
    Box::into_raw(ctx).cast()
}

unsafe extern "C" fn fd(ctx: *mut c_void) -> c_int {
    // SAFETY: `ctx` comes from `start`.
    unsafe { (*ctx.cast::<Ctx>()).epfd }
}

unsafe extern "C" fn event(ctx: *mut c_void, to: *mut Event) -> c_int {
    // SAFETY: `ctx` comes from `start`, and the background thread is the only one to use it.
    let ctx = unsafe { &mut *ctx.cast::<Ctx>() };
    if ctx.queue.is_empty() {
        ctx.gather();
    }
    match ctx.queue.pop_front() {
        Some(e) => {
            // SAFETY: the caller's structure.
            unsafe { to.write(e) };
            1
        }
        None => 0,
    }
}

unsafe extern "C" fn listen(
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
    let id = ctx.id(cm, token);
    // SAFETY: the caller's pointer.
    unsafe { to.write(id.cast()) };
    0
}

unsafe extern "C" fn dial(
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
    let from = match ctx.gid_index {
        Some(index) => match host::address_at(index, &addr, &ctx.device, ctx.software) {
            Some(a) => a,
            None => return libc::EADDRNOTAVAIL,
        },
        None => from,
    };
    let cm = match ctx.new_cm() {
        Ok(cm) => cm,
        Err(e) => return e,
    };
    let (mut src, mut dst) = (host::sockaddr(&from, 0), host::sockaddr(&addr, port));
    let id = ctx.id(cm, token);
    // SAFETY: a live id and valid addresses.
    let r =
        checked(unsafe { (ctx.lib.rdma_resolve_addr)(cm, (&raw mut src).cast(), (&raw mut dst).cast(), RESOLVE_MS) });
    if r != 0 {
        // SAFETY: nobody else has the id.
        unsafe { close(id.cast()) };
        return r;
    }
    // SAFETY: the caller's pointer.
    unsafe { to.write(id.cast()) };
    0
}

unsafe extern "C" fn open(id: *mut c_void, writes: u32, receives: u32, token: u64, to: *mut Limits) -> c_int {
    // SAFETY: an id of ours, used by the background thread alone until it is open.
    let (ptr, id) = (id.cast::<Id>(), unsafe { &mut *id.cast::<Id>() });
    // SAFETY: the context outlives its ids.
    let ctx = unsafe { &mut *id.ctx };
    // SAFETY: a live id.
    let verbs = unsafe { (*id.cm).verbs };
    if verbs.is_null() {
        return libc::ENODEV;
    }
    let Some(dev) = ctx.use_dev(verbs) else { return errno() };
    id.dev = dev;
    // SAFETY: live objects throughout; what is made is destroyed by `close`.
    unsafe {
        let mut attr: ffi::DeviceAttr = core::mem::zeroed();
        if (ctx.lib.ibv_query_device)(verbs, &mut attr) != 0 {
            return errno();
        }
        let most = attr.max_qp_wr.max(16) as u32;
        let (writes, receives) = (writes.min(most), receives.min(most));
        id.pd = (ctx.lib.ibv_alloc_pd)(verbs);
        if id.pd.is_null() {
            return errno();
        }
        let cqe = ((writes + receives) as c_int).min(attr.max_cqe);
        id.cq = (ctx.lib.ibv_create_cq)(verbs, cqe, token as *mut c_void, (*(*dev).ear).channel, 0);
        if id.cq.is_null() {
            return errno();
        }
        // How much can be sent inline cannot be asked: it is tried, from much to little.
        for inline in [256, 128, 64, 0] {
            let cap = QpCap {
                max_send_wr: writes,
                max_recv_wr: receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            };
            let mut init = QpInitAttr {
                qp_context: null_mut(),
                send_cq: id.cq,
                recv_cq: id.cq,
                srq: null_mut(),
                cap,
                qp_type: ffi::QPT_RC,
                sq_sig_all: 0,
            };
            if (ctx.lib.rdma_create_qp)(id.cm, id.pd, &mut init) == 0 {
                // Option 3 of level 0 is the acknowledgement timeout; older kernels do not have it.
                let mut timeout = ACK_TIMEOUT;
                (ctx.lib.rdma_set_option)(id.cm, 0, 3, (&raw mut timeout).cast(), 1);
                id.token = token;
                ctx.open.push(ptr);
                to.write(Limits {
                    writes: init.cap.max_send_wr.min(writes),
                    inline: init.cap.max_inline_data,
                    software: host::is_software(&ctx.name_of(verbs)).into(),
                });
                return 0;
            }
        }
    }
    errno()
}

unsafe extern "C" fn channel(id: *mut c_void, to: *mut Channel) {
    // SAFETY: an open id of ours, so it has a device with a channel.
    unsafe {
        let ear = (*(*id.cast::<Id>()).dev).ear;
        to.write(Channel { fd: (*(*ear).channel).fd, handle: ear.cast() });
    }
}

unsafe extern "C" fn heard(channel: *mut c_void, to: *mut u64) -> c_int {
    let (mut cq, mut token) = (null_mut(), null_mut());
    // SAFETY: a channel that is not buried yet. The event is acknowledged at once: until then the queue that it
    // names is not destroyed.
    unsafe {
        let c = &*channel.cast::<Ear>();
        if (c.get)(c.channel, &mut cq, &mut token) != 0 {
            return 0;
        }
        (c.ack)(cq, 1);
        to.write(token as u64);
    }
    1
}

unsafe extern "C" fn register(id: *mut c_void, at: *mut u8, len: usize, remote: c_int, to: *mut Memory) -> c_int {
    // SAFETY: an open id of ours; registrations are the background thread's.
    let id = unsafe { &mut *id.cast::<Id>() };
    let access = if remote != 0 { ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE } else { 0 };
    // SAFETY: the memory is the caller's, and lives until the id is closed.
    unsafe {
        let mr = ((*id.ctx).lib.ibv_reg_mr)(id.pd, at.cast(), len, access);
        if mr.is_null() {
            return errno();
        }
        id.memory.push(mr);
        to.write(Memory { handle: mr.cast(), lkey: (*mr).lkey, rkey: (*mr).rkey });
    }
    0
}

unsafe extern "C" fn forget(_handle: *mut c_void) {
    // Registrations end with their queue pair.
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

unsafe extern "C" fn connect(id: *mut c_void, private: *const u8, len: u32) -> c_int {
    // SAFETY: an open id of ours; the private data is readable.
    unsafe {
        let id = &*id.cast::<Id>();
        checked(((*id.ctx).lib.rdma_connect)(id.cm, &mut param(private, len)))
    }
}

unsafe extern "C" fn accept(id: *mut c_void, private: *const u8, len: u32) -> c_int {
    // SAFETY: as for `connect`.
    unsafe {
        let id = &*id.cast::<Id>();
        checked(((*id.ctx).lib.rdma_accept)(id.cm, &mut param(private, len)))
    }
}

unsafe extern "C" fn reject(id: *mut c_void, private: *const u8, len: u32) -> c_int {
    // SAFETY: as for `connect`.
    unsafe {
        let id = &*id.cast::<Id>();
        checked(((*id.ctx).lib.rdma_reject)(id.cm, private.cast(), len as u8))
    }
}

unsafe extern "C" fn disconnect(id: *mut c_void) -> c_int {
    // SAFETY: an open id of ours.
    unsafe {
        let id = &*id.cast::<Id>();
        checked(((*id.ctx).lib.rdma_disconnect)(id.cm))
    }
}

unsafe extern "C" fn close(id: *mut c_void) {
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

/// Writes that go to the device in one call.
const LIST: usize = 16;

unsafe extern "C" fn post(id: *mut c_void, list: *const Write, n: u32) -> c_int {
    // SAFETY: an open id of ours, and `n` readable writes.
    let (id, list) = unsafe { (&*id.cast::<Id>(), std::slice::from_raw_parts(list, n as usize)) };
    // SAFETY: live objects.
    let (qp, post_send) = unsafe { ((*id.cm).qp, (*(*(*id.cm).qp).context).post_send) };
    for part in list.chunks(LIST) {
        let mut sge = [const { MaybeUninit::<Sge>::uninit() }; LIST];
        let mut wr = [const { MaybeUninit::<SendWr>::uninit() }; LIST];
        for (i, w) in part.iter().enumerate() {
            sge[i].write(Sge { addr: w.from, length: w.len, lkey: w.lkey });
            let f = w.flags;
            let bit = |b: u32, to: u32| if f & b != 0 { to } else { 0 };
            let next = if i + 1 < part.len() { wr[i + 1].as_mut_ptr() } else { null_mut() };
            wr[i].write(SendWr {
                wr_id: w.id,
                next,
                sg_list: sge[i].as_mut_ptr(),
                num_sge: (w.len > 0) as c_int,
                opcode: ffi::WR_WRITE_WITH_IMM,
                send_flags: bit(provider::SIGNALED, ffi::SEND_SIGNALED)
                    | bit(provider::INLINE, ffi::SEND_INLINE)
                    | bit(provider::SOLICITED, ffi::SEND_SOLICITED),
                imm_data: w.imm.to_be(),
                remote_addr: w.to,
                rkey: w.rkey,
                _rest: [0; 9],
            });
        }
        let mut bad = null_mut();
        // SAFETY: a list of valid requests whose memory is registered.
        let r = unsafe { post_send(qp, wr.as_mut_ptr().cast(), &mut bad) };
        if r != 0 {
            return r.abs().max(1);
        }
    }
    0
}

unsafe extern "C" fn post_recv(id: *mut c_void, n: u32) -> c_int {
    // SAFETY: an open id of ours.
    let id = unsafe { &*id.cast::<Id>() };
    // SAFETY: live objects.
    let (qp, post_recv) = unsafe { ((*id.cm).qp, (*(*(*id.cm).qp).context).post_recv) };
    let mut left = n as usize;
    while left > 0 {
        let part = left.min(LIST);
        let mut wr = [RecvWr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 }; LIST];
        for i in 0..part - 1 {
            wr[i].next = &raw mut wr[i + 1];
        }
        let mut bad = null_mut();
        // SAFETY: a list of valid requests without memory: what arrives is written by the peer.
        let r = unsafe { post_recv(qp, wr.as_mut_ptr(), &mut bad) };
        if r != 0 {
            return r.abs().max(1);
        }
        left -= part;
    }
    0
}

unsafe extern "C" fn poll(id: *mut c_void, to: *mut Done, n: c_int) -> c_int {
    // SAFETY: an open id of ours.
    let cq = unsafe { (*id.cast::<Id>()).cq };
    // Mostly there is nothing, so nothing is cleared before it is known.
    let mut wc = [const { MaybeUninit::<Wc>::uninit() }; 32];
    // SAFETY: a live queue and room for as many completions as are asked for.
    let got = unsafe { ((*(*cq).context).poll_cq)(cq, n.clamp(0, 32), wc.as_mut_ptr().cast()) };
    for (i, w) in wc.iter().enumerate().take(got.max(0) as usize) {
        // SAFETY: written by the device's driver.
        let w = unsafe { w.assume_init_ref() };
        // After a failure only number and status of a completion are valid; ids of writes are not 0.
        let received = if w.status == 0 { w.opcode == ffi::WC_RECV_WITH_IMM } else { w.wr_id == 0 };
        let d = Done {
            id: w.wr_id,
            status: w.status,
            received: received.into(),
            len: w.byte_len,
            imm: u32::from_be(w.imm_data),
        };
        // SAFETY: the caller has room for `n`.
        unsafe { to.add(i).write(d) };
    }
    got
}

unsafe extern "C" fn arm(id: *mut c_void, solicited: c_int) -> c_int {
    // SAFETY: an open id of ours.
    unsafe {
        let cq = (*id.cast::<Id>()).cq;
        ((*(*cq).context).req_notify_cq)(cq, solicited)
    }
}

unsafe extern "C" fn way(addr: *const [u8; 16], to: *mut c_char, len: *mut usize) -> c_int {
    let text = match Lib::load() {
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
    let text = match Lib::load() {
        Ok(lib) => host::describe(&lib),
        Err(e) => e.to_string(),
    };
    let n = text.len().min(len);
    // SAFETY: the caller's buffer.
    unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), n) };
    n
}
