// Browsers start no worker in a page that was opened as a file. There the search of the theme runs in a
// hidden frame, which takes the messages of a worker; it looks for IFrameWorker, and for this file.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: new URL(source, location.href), onload: resolve, onerror: reject });
          inside.document.body.append(script);
        });
      const answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.postMessage = answer;
      inside.importScripts = (...sources) =>
        sources.reduce((done, source) => done.then(() => load(source)), Promise.resolve());
      this.frame = frame;
      this.ready = load(address);
    }
    postMessage(data) {
      const send = () => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.ready.then(send);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
