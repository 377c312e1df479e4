// A page that is opened as a file may start no worker: the search then runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.ready = new Promise((resolve) => (frame.onload = resolve));
      addEventListener("message", (event) => {
        if (event.source !== this.inside) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      frame.contentDocument.open();
      frame.contentDocument.write(`<body><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => Promise.all(urls.map((url) => new Promise((resolve) => {
          const script = document.createElement("script");
          script.onload = resolve; script.src = url; document.body.append(script);
        })));
      </script><script src="${url}"></script></body>`);
      frame.contentDocument.close();
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
