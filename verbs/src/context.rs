//! Devices in use, and what the kernel has to tell of them and of ids of librdmacm.

use crate::ffi::{self, cm, CmChannel, CmId, CompChannel, Context, Cq, Lib, Mr, Pd};
use crate::host;
use libc::{c_char, c_int, c_void};
use ringsock_core::provider::{self, Event, Options, Release, What};
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// How long the search for a way to the peer may take, in ms.
pub const RESOLVE_MS: c_int = 1000;

/// A device in use.
pub struct Dev {
    verbs: *mut Context,
    /// A box of its own, which outlives this.
    pub ear: *mut Ear,
    users: u32,
    /// See `provider::Direct`.
    pub quiet: bool,
}

/// A completion channel, for threads that know nothing else of the provider.
pub struct Ear {
    pub channel: *mut CompChannel,
    pub get: unsafe extern "C" fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int,
    pub ack: unsafe extern "C" fn(*mut Cq, libc::c_uint),
}

/// The provider's state.
pub struct Ctx {
    pub lib: Lib,
    cm: *mut CmChannel,
    epfd: c_int,
    /// In boxes, because ids point to them.
    #[allow(clippy::vec_box)]
    devs: Vec<Box<Dev>>,
    pub device: String,
    pub software: bool,
    pub gid_index: Option<u32>,
    place: extern "C" fn(c_int) -> c_int,
    release: extern "C" fn(c_int, Release),
    /// Fds of contexts that have their places.
    placed: Vec<c_int>,
    pub queue: VecDeque<Event>,
    /// Queue pairs, for events that name a completion queue or nothing.
    pub open: Vec<*mut Id>,
    /// All that are not closed.
    pub ids: Vec<*mut Id>,
    gone: Vec<Gone>,
    /// For each device that librdmacm has open an id that is bound there and nothing else: that the device is being
    /// removed is told to ids only, and to nobody where a process has none at the moment.
    sentinels: Vec<(*mut Context, *mut CmId)>,
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
pub struct Id {
    pub ctx: *mut Ctx,
    pub cm: *mut CmId,
    pub token: u64,
    pub dev: *mut Dev,
    pub pd: *mut Pd,
    pub cq: *mut Cq,
    pub memory: Vec<*mut Mr>,
}

pub fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO).max(1)
}

/// 0, or what errno says.
pub fn checked(r: c_int) -> c_int {
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

    pub fn name_of(&self, verbs: *mut Context) -> String {
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
    pub fn allows(&self, verbs: *mut Context) -> bool {
        !verbs.is_null() && host::allowed(&self.name_of(verbs), &self.device, self.software)
    }

    pub fn id(&mut self, cm: *mut CmId, token: u64) -> *mut Id {
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

    pub fn new_cm(&mut self) -> Result<*mut CmId, c_int> {
        let mut cm = null_mut();
        // SAFETY: the channel lives as long as the provider.
        match checked(unsafe { (self.lib.rdma_create_id)(self.cm, &mut cm, null_mut(), ffi::PS_TCP) }) {
            0 => Ok(cm),
            e => Err(e),
        }
    }

    /// Gives an fd its place; false: there is none.
    fn place(&self, fd: &mut c_int) -> bool {
        match (self.place)(*fd) {
            -1 => false,
            placed => {
                *fd = placed;
                true
            }
        }
    }

    /// As [`Ctx::place`], for the fds of a context.
    ///
    /// # Safety
    /// The context must be live.
    unsafe fn place_device(&mut self, verbs: *mut Context) -> bool {
        // SAFETY: the caller's promise.
        let verbs = unsafe { &mut *verbs };
        for fd in [&mut verbs.cmd_fd, &mut verbs.async_fd] {
            if !self.placed.contains(fd) {
                if !self.place(fd) {
                    return false;
                }
                self.placed.push(*fd);
            }
        }
        true
    }

    /// The device of `verbs`, noted as used once more.
    pub fn use_dev(&mut self, verbs: *mut Context) -> Option<*mut Dev> {
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
            if !self.place_device(verbs) || !self.place(&mut (*channel).fd) {
                (self.lib.ibv_destroy_comp_channel)(channel);
                *libc::__errno_location() = libc::EMFILE;
                return None;
            }
            nonblocking((*channel).fd);
            self.watch((*verbs).async_fd);
        }
        // SAFETY: a live context.
        let quiet = crate::driver::bind(unsafe { (*verbs).post_send } as *const c_void, self.place as *const c_void);
        let ear = Ear { channel, get: self.lib.ibv_get_cq_event, ack: self.lib.ibv_ack_cq_events };
        self.devs.push(Box::new(Dev { verbs, ear: Box::into_raw(Box::new(ear)), users: 1, quiet }));
        self.devs.last_mut().map(|d| &mut **d as *mut Dev)
    }

    pub fn drop_dev(&mut self, dev: *mut Dev) {
        let Some(i) = self.devs.iter().position(|d| std::ptr::eq(&**d, dev)) else { return };
        self.devs[i].users -= 1;
        if self.devs[i].users == 0 {
            let d = self.devs.remove(i);
            // SAFETY: a live context.
            self.unwatch(unsafe { (*d.verbs).async_fd });
            // SAFETY: no queue pair uses the channel, and by the contract no thread hears of it any more.
            unsafe {
                let ear = Box::from_raw(d.ear);
                (self.release)((*ear.channel).fd, Release::Closed);
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
    pub fn let_go(&mut self) {
        // SAFETY: ids in the list are live.
        let used = |v: *mut Context, ids: &[*mut Id]| ids.iter().any(|id| unsafe { (*(**id).cm).verbs } == v);
        for g in self.gone.extract_if(.., |g| !used(g.verbs, &self.ids)) {
            // A context that no queue pair has used has its fds where they were opened.
            let placed: Vec<c_int> = self.placed.extract_if(.., |fd| *fd == g.cmd_fd || *fd == g.async_fd).collect();
            // librdmacm may have closed it by itself, and the number be somebody else's.
            if device_of(g.cmd_fd) != Some(g.number) {
                for fd in placed {
                    (self.release)(fd, Release::Gone);
                }
                continue;
            }
            // SAFETY: fds of the context's, which only fails calls from now on.
            unsafe {
                let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                for fd in &placed {
                    (self.release)(*fd, Release::Replaced);
                }
                for fd in [g.cmd_fd, g.async_fd] {
                    libc::dup3(null, fd, libc::O_CLOEXEC);
                }
                libc::close(null);
            }
        }
    }

    /// Sees to it that the removal of the device of `cm` is heard of, also when `cm` is closed.
    pub fn attend(&mut self, cm: *mut CmId) {
        // SAFETY: a live id of librdmacm.
        let (verbs, mut src) = unsafe { ((*cm).verbs, (*cm).src) };
        if verbs.is_null() || self.sentinels.iter().any(|(v, _)| *v == verbs) {
            return;
        }
        let Ok(own) = self.new_cm() else { return };
        // Any port.
        src = host::sockaddr(&host::octets(&src), 0);
        // SAFETY: a live id of ours, whose context is null, and a valid address.
        unsafe {
            if (self.lib.rdma_bind_addr)(own, (&raw mut src).cast()) == 0 && (*own).verbs == verbs {
                self.sentinels.push((verbs, own));
            } else {
                (self.lib.rdma_destroy_id)(own);
            }
        }
    }

    /// The device of a sentinel is being removed.
    fn sentinel_calls(&mut self, cm: *mut CmId) {
        let Some(i) = self.sentinels.iter().position(|(_, own)| *own == cm) else { return };
        let (verbs, _) = self.sentinels.swap_remove(i);
        self.goes(verbs);
        // SAFETY: an id that only the list had; its event is acknowledged.
        unsafe { (self.lib.rdma_destroy_id)(cm) };
        self.let_go();
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
            let Some(id) = (unsafe { (*cm_id).context.cast::<Id>().as_ref() }) else {
                if kind == cm::DEVICE_REMOVAL {
                    self.sentinel_calls(cm_id);
                }
                continue;
            };
            (ev.id, ev.token) = ((id as *const Id).cast_mut().cast(), id.token);
            ev.what = match kind {
                cm::ADDR_RESOLVED => {
                    self.attend(cm_id);
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
        self.attend(cm_id);
        ev.id = self.id(cm_id, 0).cast();
        self.queue.push_back(ev);
    }
}

pub unsafe extern "C" fn start(o: *mut Options) -> *mut c_void {
    // SAFETY: the core gives a valid structure.
    let o = unsafe { &mut *o };
    let mut fail = |text: &str| {
        for (to, b) in o.why.iter_mut().zip(text.bytes().take(127).chain([0])) {
            *to = b as c_char;
        }
        null_mut()
    };
    let lib = match crate::load() {
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
    let mut ctx = Box::new(Ctx {
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
        sentinels: Vec::new(),
    });
    let mut epfd = epfd;
    // SAFETY: a live channel. librdmacm uses the number in this structure, which is public.
    if !unsafe { ctx.place(&mut (*channel).fd) } || !ctx.place(&mut epfd) {
        return fail("there is no number for an fd of librdmacm's");
    }
    ctx.epfd = epfd;
    // SAFETY: a live channel.
    ctx.watch(unsafe { (*channel).fd });
    Box::into_raw(ctx).cast()
}

pub unsafe extern "C" fn fd(ctx: *mut c_void) -> c_int {
    // SAFETY: `ctx` comes from `start`.
    unsafe { (*ctx.cast::<Ctx>()).epfd }
}

pub unsafe extern "C" fn event(ctx: *mut c_void, to: *mut Event) -> c_int {
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
